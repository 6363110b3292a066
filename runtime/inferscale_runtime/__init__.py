"""InferScale runtime: encode facts once, keep their KV, inject it into vLLM.

Importing this package, ``config``, ``fingerprint`` or ``errors`` must not import torch or vLLM:
the operator image has neither.
"""

__version__ = "0.2.0"
