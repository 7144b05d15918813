"""vllm-supervisor: starts vLLM engines, proves that they answer, repairs them with the least harm."""

__version__ = "0.1.0"
