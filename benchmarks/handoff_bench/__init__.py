"""What a hand-over costs on real vLLM, and its parts."""
