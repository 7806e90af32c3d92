"""Connectors: what launcher and router must know of each. Pure: values in, values out; no vLLM, no I/O."""
