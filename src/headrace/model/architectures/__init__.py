"""One file for each architecture: all there is to know of it. Nothing outside knows a family.

gemma.py is what two of them share.
"""

from headrace.model.architectures.gemma2 import GEMMA2
from headrace.model.architectures.gemma3 import GEMMA3
from headrace.model.architectures.llama import LLAMA
from headrace.model.architectures.mistral import MISTRAL
from headrace.model.architectures.phi3 import PHI3
from headrace.model.architectures.qwen2 import QWEN2
from headrace.model.architectures.qwen3 import QWEN3

ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3)
