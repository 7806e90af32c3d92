"""kvrelay: prefill/decode disaggregation for vLLM, with proof of every hand-over."""

__version__ = "0.1.0"
