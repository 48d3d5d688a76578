"""One file for each architecture: all there is to know of it. Nothing outside knows a family.

gemma.py and qwen_moe.py are what two of them share, gpt_oss_experts.py is a part of one.
"""

from headrace.model.architectures.gemma2 import GEMMA2
from headrace.model.architectures.gemma3 import GEMMA3
from headrace.model.architectures.gpt_oss import GPT_OSS
from headrace.model.architectures.granite import GRANITE
from headrace.model.architectures.llama import LLAMA
from headrace.model.architectures.mistral import MISTRAL
from headrace.model.architectures.mixtral import MIXTRAL
from headrace.model.architectures.olmoe import OLMOE
from headrace.model.architectures.phi3 import PHI3
from headrace.model.architectures.qwen2 import QWEN2
from headrace.model.architectures.qwen2_moe import QWEN2_MOE
from headrace.model.architectures.qwen3 import QWEN3
from headrace.model.architectures.qwen3_moe import QWEN3_MOE
from headrace.model.architectures.smollm3 import SMOLLM3

ARCHITECTURES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3, MIXTRAL, QWEN2_MOE,
    QWEN3_MOE, OLMOE, GPT_OSS,
)  # fmt: skip
