"""Names of models and GPUs as people write them in READMEs and issues: found, or refused with what would be right.

A model's line: the name, the bundled model whose layers it has, and its number formats. An error's: words of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.models import hub_name, model, model_ids, names
from kernelcast.models.catalogue import bundled, config, names_of
from kernelcast.models.precision import Precision

MODELS = """
meta-llama/Llama-3.1-8B-Instruct | llama-3.1-8b | bf16
meta-llama/Meta-Llama-3.1-8B | llama-3.1-8b | bf16
Meta-Llama-3.1-8B-Instruct | llama-3.1-8b | bf16
NousResearch/Meta-Llama-3.1-8B-Instruct | llama-3.1-8b | bf16
unsloth/Llama-3.1-8B-Instruct | llama-3.1-8b | bf16
unsloth/Meta-Llama-3.1-8B | llama-3.1-8b | bf16
mlabonne/Meta-Llama-3.1-8B-Instruct-abliterated | llama-3.1-8b | bf16
llama3.1-8b | llama-3.1-8b | bf16
llama3.1:8b | llama-3.1-8b | bf16
Llama 3.1 8B | llama-3.1-8b | bf16
Llama 3.1 8B Instruct | llama-3.1-8b | bf16
llama_3.1_8b | llama-3.1-8b | bf16
LLAMA-3.1-8B | llama-3.1-8b | bf16
models--meta-llama--Llama-3.1-8B-Instruct | llama-3.1-8b | bf16
NousResearch/Hermes-3-Llama-3.1-8B | llama-3.1-8b | bf16
deepseek-ai/DeepSeek-R1-Distill-Llama-8B | llama-3.1-8b | bf16
unsloth/DeepSeek-R1-Distill-Llama-8B | llama-3.1-8b | bf16
allenai/Llama-3.1-Tulu-3-8B | llama-3.1-8b | bf16
meta-llama/Llama-Guard-3-8B | llama-3.1-8b | bf16
nvidia/Llama-3.1-Nemotron-Nano-8B-v1 | llama-3.1-8b | bf16
meta-llama/Llama-3.1-70B-Instruct | llama-3.1-70b | bf16
llama3.1:70b | llama-3.1-70b | bf16
nvidia/Llama-3.1-Nemotron-70B-Instruct-HF | llama-3.1-70b | bf16
NousResearch/Hermes-4-70B | llama-3.1-70b | bf16
meta-llama/Llama-3.3-70B-Instruct | llama-3.3-70b | bf16
Llama-3.3-70B | llama-3.3-70b | bf16
unsloth/Llama-3.3-70B-Instruct | llama-3.3-70b | bf16
deepseek-ai/DeepSeek-R1-Distill-Llama-70B | llama-3.3-70b | bf16
deepseek-r1:70b | llama-3.3-70b | bf16
meta-llama/Llama-3.1-405B-Instruct | llama-3.1-405b | bf16
NousResearch/Hermes-3-Llama-3.1-405B | llama-3.1-405b | bf16
meta-llama/Llama-3.2-1B-Instruct | llama-3.2-1b | bf16
unsloth/Llama-3.2-1B | llama-3.2-1b | bf16
llama3.2:3b | llama-3.2-3b | bf16
NousResearch/Hermes-3-Llama-3.2-3B | llama-3.2-3b | bf16
meta-llama/Meta-Llama-3-8B-Instruct | llama-3-8b | bf16
NousResearch/Meta-Llama-3-8B | llama-3-8b | bf16
NousResearch/Hermes-2-Pro-Llama-3-8B | llama-3-8b | bf16
llama3:70b | llama-3-70b | bf16
meta-llama/Llama-2-7b-chat-hf | llama-2-7b | bf16
NousResearch/Llama-2-7b-hf | llama-2-7b | bf16
Llama 2 13B Chat | llama-2-13b | bf16
lmsys/vicuna-7b-v1.5 | llama-2-7b | bf16
lmsys/vicuna-13b-v1.5 | llama-2-13b | bf16
codellama/CodeLlama-7b-Instruct-hf | codellama-7b | bf16
codellama/CodeLlama-34b-Instruct-hf | codellama-34b | bf16
TinyLlama/TinyLlama-1.1B-Chat-v1.0 | tinyllama-1.1b | bf16
meta-llama/Llama-4-Scout-17B-16E-Instruct | llama-4-scout | bf16
meta-llama/Llama-4-Maverick-17B-128E-Instruct | llama-4-maverick | bf16
Qwen/Qwen2.5-7B-Instruct | qwen2.5-7b | bf16
Qwen/Qwen2.5-Coder-7B-Instruct | qwen2.5-7b | bf16
Qwen/Qwen2.5-Math-7B-Instruct | qwen2.5-7b | bf16
Qwen/Qwen2.5-Coder-32B-Instruct | qwen2.5-32b | bf16
qwen2.5-coder:32b | qwen2.5-32b | bf16
Qwen/QwQ-32B | qwen2.5-32b | bf16
qwq:32b | qwen2.5-32b | bf16
Qwen/QwQ-32B-Preview | qwen2.5-32b | bf16
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B | deepseek-r1-distill-qwen-1.5b | bf16
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B | qwen2.5-7b | bf16
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B | qwen2.5-14b | bf16
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B | qwen2.5-32b | bf16
deepseek-r1:14b | qwen2.5-14b | bf16
simplescaling/s1.1-32B | qwen2.5-32b | bf16
qwen2.5:0.5b | qwen2.5-0.5b | bf16
unsloth/Qwen2.5-1.5B-Instruct | qwen2.5-1.5b | bf16
Qwen2.5 72B Instruct | qwen2.5-72b | bf16
moonshotai/Kimi-Dev-72B | qwen2.5-72b | bf16
Qwen/Qwen2.5-VL-7B-Instruct | qwen2.5-vl-7b | bf16
ByteDance-Seed/UI-TARS-1.5-7B | qwen2.5-vl-7b | bf16
Qwen/Qwen3-8B-Base | qwen3-8b | bf16
qwen3:8b | qwen3-8b | bf16
unsloth/Qwen3-14B | qwen3-14b | bf16
deepseek-ai/DeepSeek-R1-0528-Qwen3-8B | qwen3-8b | bf16
NousResearch/Hermes-4-14B | qwen3-14b | bf16
huihui-ai/Qwen3-32B-abliterated | qwen3-32b | bf16
Qwen/Qwen3-30B-A3B-Thinking-2507 | qwen3-30b-a3b-2507 | bf16
unsloth/Qwen3-Coder-30B-A3B-Instruct | qwen3-30b-a3b-2507 | bf16
qwen3:30b-a3b | qwen3-30b-a3b | bf16
Qwen/Qwen3-4B-Instruct-2507 | qwen3-4b-2507 | bf16
Qwen/Qwen3-Next-80B-A3B-Thinking | qwen3-next-80b-a3b | bf16
Qwen/Qwen3-Reranker-4B | qwen3-4b | bf16
mistralai/Mistral-7B-Instruct-v0.3 | mistral-7b-v0.3 | bf16
unsloth/mistral-7b-instruct-v0.2 | mistral-7b-v0.2 | bf16
HuggingFaceH4/zephyr-7b-beta | mistral-7b-v0.1 | bf16
teknium/OpenHermes-2.5-Mistral-7B | mistral-7b-v0.1 | bf16
mistralai/Mathstral-7B-v0.1 | mistral-7b-v0.3 | bf16
mistralai/Mistral-Nemo-Instruct-2407 | mistral-nemo-12b | bf16
mistralai/Mistral-Small-Instruct-2409 | codestral-22b | bf16
mistralai/Devstral-Small-2505 | mistral-small-24b | bf16
mistralai/Mistral-Large-Instruct-2411 | mistral-large-123b | bf16
mixtral:8x7b | mixtral-8x7b | bf16
mistralai/Mixtral-8x22B-Instruct-v0.1 | mixtral-8x22b-instruct-v0.1 | bf16
alpindale/WizardLM-2-8x22B | mixtral-8x22b | bf16
google/gemma-3-27b-it | gemma-3-27b | bf16
gemma3:12b | gemma-3-12b | bf16
unsloth/gemma-2-9b-it | gemma-2-9b | bf16
google/medgemma-4b-it | gemma-3-4b | bf16
microsoft/phi-4 | phi-4 | bf16
phi4:14b | phi-4 | bf16
microsoft/Phi-4-reasoning | phi-4 | bf16
microsoft/Phi-3.5-mini-instruct | phi-3-mini-128k | bf16
microsoft/Phi-3-mini-4k-instruct | phi-3-mini | bf16
openai/gpt-oss-120b | gpt-oss-120b | bf16, experts mxfp4
unsloth/gpt-oss-20b | gpt-oss-20b | bf16, experts mxfp4
gpt-oss:20b | gpt-oss-20b | bf16, experts mxfp4
openai/gpt-oss-safeguard-20b | gpt-oss-20b | bf16, experts mxfp4
deepseek-ai/DeepSeek-V3-0324 | deepseek-v3 | fp8_block
deepseek-ai/DeepSeek-V3.1-Terminus | deepseek-v3 | fp8_block
deepseek-ai/DeepSeek-R1-0528 | deepseek-r1 | fp8_block
deepseek-r1:671b | deepseek-r1 | fp8_block
deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct | deepseek-v2-lite | bf16
moonshotai/Kimi-K2-Instruct-0905 | kimi-k2 | fp8_block
zai-org/GLM-4.5-Air | glm-4.5-air | bf16
ibm-granite/granite-3.1-8b-instruct | granite-3.3-8b | bf16
01-ai/Yi-34B-Chat | yi-34b | bf16
facebook/opt-13b | opt-13b | bf16
gpt2 | gpt2 | bf16
Qwen/Qwen3-Embedding-0.6B | qwen3-embedding-0.6b | bf16
Qwen/Qwen3-Embedding-4B | qwen3-embedding-4b | bf16
Qwen/Qwen3-Embedding-8B | qwen3-embedding-8b | bf16
BAAI/bge-m3 | bge-m3 | bf16
BAAI/bge-large-en-v1.5 | bert-large | bf16
BAAI/bge-small-en-v1.5 | all-minilm-l12-v2 | bf16
intfloat/e5-large-v2 | bert-large | bf16
intfloat/multilingual-e5-large | xlm-roberta-large | bf16
sentence-transformers/all-MiniLM-L6-v2 | all-minilm-l6-v2 | bf16
Qwen/Qwen2.5-72B-Instruct-AWQ | qwen2.5-72b | int4
Qwen/Qwen2.5-Coder-32B-Instruct-AWQ | qwen2.5-32b | int4
Qwen/QwQ-32B-AWQ | qwen2.5-32b | int4
hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 | llama-3.1-70b | int4
cyankiwi/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit | qwen3-30b-a3b-2507 | int4
QuantTrio/GLM-4.6-AWQ | glm-4.6 | int4
casperhansen/llama-3-70b-instruct-awq | llama-3-70b | int4
TheBloke/Llama-2-7B-Chat-AWQ | llama-2-7b | int4
Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4 | qwen2.5-72b | int4
Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8 | qwen2.5-72b | int8_wo
TheBloke/Mistral-7B-Instruct-v0.2-GPTQ | mistral-7b-v0.2 | int4
TheBloke/Llama-2-13B-chat-GPTQ | llama-2-13b | int4
Qwen/Qwen3-8B-FP8 | qwen3-8b | fp8_block
Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8 | qwen3-30b-a3b-2507 | fp8_block
Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 | qwen3-235b-a22b-2507 | fp8_block
qwen3 14b fp8 | qwen3-14b | fp8_block
neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8 | llama-3.1-8b | fp8
RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8 | llama-3.1-8b | fp8
RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic | llama-3.3-70b | fp8
RedHatAI/Qwen3-8B-FP8-dynamic | qwen3-8b | fp8
RedHatAI/DeepSeek-R1-Distill-Qwen-32B-FP8-dynamic | qwen2.5-32b | fp8
nvidia/Llama-3.1-8B-Instruct-FP8 | llama-3.1-8b-fp8 | fp8, KV cache fp8
nvidia/Llama-3.3-70B-Instruct-FP4 | llama-3.3-70b-nvfp4 | nvfp4, KV cache fp8
nvidia/Llama-3.1-8B-Instruct-NVFP4 | llama-3.1-8b | nvfp4, KV cache fp8
RedHatAI/Qwen3-32B-NVFP4 | qwen3-32b | nvfp4
RedHatAI/Mistral-Small-3.2-24B-Instruct-2506-NVFP4 | mistral-small-3.2-24b | nvfp4
meta-llama/Llama-3.1-405B-Instruct-FP8 | llama-3.1-405b | bf16, mlp fp8
meta-llama/Meta-Llama-3.1-405B-FP8 | llama-3.1-405b | bf16, mlp fp8
llama 3 8b fp8 | llama-3-8b | fp8
nvidia/DeepSeek-R1-0528-FP4 | deepseek-r1-nvfp4 | bf16, mlp nvfp4, experts nvfp4
amd/Llama-3.1-70B-Instruct-FP8-KV | llama-3.1-70b | fp8, KV cache fp8
RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8 | llama-3.1-8b | int8
RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16 | llama-3.1-70b | int4
neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a16 | llama-3.1-8b | int8_wo
RedHatAI/gemma-3-27b-it-quantized.w4a16 | gemma-3-27b | int4
unsloth/gpt-oss-20b-BF16 | gpt-oss-20b | bf16
unsloth/DeepSeek-V3-bf16 | deepseek-v3 | bf16
"""

# of other kernels than those that are forecast: in the format that `dtype` gives, and refused without one
WITHOUT_KERNELS = """
unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit | llama-3.1-8b | bitsandbytes
unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit | qwen2.5-7b | bitsandbytes
unsloth/llama-3-8b-bnb-4bit | llama-3-8b | bitsandbytes
bartowski/Qwen2.5-7B-Instruct-GGUF | qwen2.5-7b | GGUF
unsloth/DeepSeek-R1-GGUF | deepseek-r1 | GGUF
TheBloke/Llama-2-7B-Chat-GGUF | llama-2-7b | GGUF
Qwen3-8B-Q4_K_M.gguf | qwen3-8b | GGUF
qwen2.5:7b-instruct-q4_K_M | qwen2.5-7b | GGUF
llama3.1:8b-instruct-q8_0 | llama-3.1-8b | GGUF
google/gemma-3-12b-it-qat-q4_0-gguf | gemma-3-12b | GGUF
bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M | llama-3.3-70b | GGUF
hf.co/bartowski/Qwen2.5-7B-Instruct-GGUF:Q8_0 | qwen2.5-7b | GGUF
mlx-community/Llama-3.2-3B-Instruct-4bit | llama-3.2-3b | 4bit
"""

REFUSED_MODELS = """
llama-3.1-9b | llama-3.1-8b
llama3.1 | llama-3.1-8b
mistral-7b | mistral-7b-v0.3
qwen3-7b | qwen3-8b
Qwen/Qwen2.5-7B-Instruct-1M | Qwen/Qwen2.5-7B
Qwen/Qwen2-VL-7B-Instruct | Qwen/Qwen2.5-VL-7B-Instruct
mistralai/Ministral-8B-Instruct-2410 | mistralai/Ministral-3-8B-Instruct-2512
nvidia/Llama-3_3-Nemotron-Super-49B-v1 | unknown model
meta-llama/Llama-3.2-11B-Vision-Instruct | unknown model
cerebras/GLM-4.5-Air-REAP-82B-A12B | zai-org/GLM-4.5-Air
RedHatAI/Sparse-Llama-3.1-8B-2of4 | meta-llama/Llama-3.1-8B
google/gemma-7b | gemma
tiiuae/falcon-40b | unknown model
deepseek-r1:8b | qwen3-8b
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B | draft of speculative decoding
openai/whisper-large-v3 | `kernelcast trace` forecasts a pass of it
stabilityai/stable-diffusion-xl-base-1.0 | `kernelcast trace` forecasts a step of its denoiser
SDXL | `kernelcast trace` forecasts a step of its denoiser
black-forest-labs/FLUX.1-dev | `kernelcast trace` forecasts a step of its denoiser
Wan-AI/Wan2.1-T2V-14B-Diffusers | `kernelcast trace` forecasts a step of its denoiser
tencent/HunyuanVideo | FILE.py:function
openai/clip-vit-large-patch14 | kernelcast trace config.json
"""

# of `kernelcast trace`, which builds them by name
TRACED_MODELS = """
SDXL | sdxl
stabilityai/stable-diffusion-xl-base-1.0 | sdxl
stabilityai/sdxl-turbo | sdxl
stable-diffusion-v1-5/stable-diffusion-v1-5 | sd-1.5
runwayml/stable-diffusion-v1-5 | sd-1.5
SD 1.5 | sd-1.5
stabilityai/stable-diffusion-3.5-large | sd-3.5-large
SD3.5 | sd-3.5-large
black-forest-labs/FLUX.1-dev | flux.1-dev
FLUX | flux.1-dev
flux1-dev | flux.1-dev
FLUX.1 schnell | flux.1-schnell
black-forest-labs/FLUX.1-schnell | flux.1-schnell
Wan-AI/Wan2.1-T2V-14B-Diffusers | wan2.1-t2v-14b
Wan2.1-T2V-1.3B | wan2.1-t2v-1.3b
Wan 2.1 | wan2.1-t2v-14b
Wan-AI/Wan2.2-T2V-A14B | wan2.1-t2v-14b
openai/whisper-large-v3 | whisper-large-v3
whisper large v3 | whisper-large-v3
openai/whisper-large-v3-turbo | whisper-large-v3-turbo
openai/whisper-small.en | whisper-small
distil-whisper/distil-large-v3 | distil-large-v3
"""

GPUS = """
a100 | a100_sxm
A100-80GB | a100_sxm
a100-80g | a100_sxm
NVIDIA A100-SXM4-80GB | a100_sxm
A100 SXM4 80GB | a100_sxm
1xA100 | a100_sxm
a100-40g | a100_sxm_40gb
A100-40GB | a100_sxm_40gb
NVIDIA A100-SXM4-40GB | a100_sxm_40gb
NVIDIA A100 80GB PCIe | a100_pcie
A100-PCIE-80GB | a100_pcie
NVIDIA A100-PCIE-40GB | a100_pcie_40gb
H100 | h100_sxm
NVIDIA H100 80GB HBM3 | h100_sxm
H100-80GB | h100_sxm
H100 SXM | h100_sxm
H100-SXM5-80GB | h100_sxm
h100-sxm5 | h100_sxm
NVIDIA H100 PCIe | h100_pcie
h100-pcie | h100_pcie
H100 PCIe 80GB | h100_pcie
NVIDIA H100 NVL | h100_nvl
H100-NVL-94GB | h100_nvl
H200 | h200_sxm
H200-141GB | h200_sxm
NVIDIA H200 | h200_sxm
H200 SXM 141GB | h200_sxm
H800 | h800_sxm
H20 | h20
H20-96GB | h20
GH200 | gh200
B200 | b200_sxm
B200-180GB | b200_sxm
NVIDIA B200 192GB | b200_sxm
B100 | b100_sxm
B300 | b300_sxm
GB200 NVL72 | gb200
GB300 | gb300
V100 | v100_sxm
V100-SXM2 | v100_sxm
V100-32GB | v100_sxm
Tesla V100-SXM2-32GB | v100_sxm
Tesla V100-SXM2-16GB | v100_sxm_16gb
V100 16GB | v100_sxm_16gb
Tesla V100-PCIE-16GB | v100_pcie_16gb
Tesla V100-PCIE-32GB | v100_pcie
Tesla T4 | t4
T4 16GB | t4
Tesla P40 | p40
P40-24GB | p40
Tesla P100-PCIE-16GB | p100_pcie
A10G | a10g
NVIDIA A10G | a10g
A10-24GB | a10
A40-48GB | a40
L4 | l4
L40S | l40s
L40S-48GB | l40s
A6000 | rtx_a6000
RTX A6000 | rtx_a6000
A5000 | rtx_a5000
RTX A4000 | rtx_a4000
RTX 6000 Ada | rtx_6000_ada
RTX 4000 Ada Generation | rtx_4000_ada
2080Ti | rtx_2080_ti
RTX 2080 Ti | rtx_2080_ti
3060 | rtx_3060
RTX 3060 12GB | rtx_3060
RTX 3060 Ti | rtx_3060_ti
rtx3070 | rtx_3070
GeForce RTX 3080 | rtx_3080
3090 | rtx_3090
RTX 3090 24GB | rtx_3090
3090 Ti | rtx_3090_ti
4060 Ti 16GB | rtx_4060_ti_16gb
RTX 4060 | rtx_4060
RTX 4070 Ti SUPER | rtx_4070_ti_super
4070 Super | rtx_4070_super
RTX 4080 | rtx_4080
NVIDIA GeForce RTX 4090 | rtx_4090
4090 | rtx_4090
RTX 4090 24GB | rtx_4090
RTX 4090D | rtx_4090_d
RTX 5060 Ti 16GB | rtx_5060_ti_16gb
RTX 5070 Ti | rtx_5070_ti
5090 | rtx_5090
NVIDIA GeForce RTX 5090 | rtx_5090
RTX PRO 6000 | rtx_pro_6000_server
DGX Spark | gb10
NVIDIA GB10 | gb10
MI300X | mi300x
AMD Instinct MI300X | mi300x
MI300X-192GB | mi300x
MI300A | mi300a
MI308X | mi308x
MI325X | mi325x
MI350X | mi350x
MI355X | mi355x
AMD Instinct MI355X OAM | mi355x
"""

REFUSED_GPUS = """
8xH100 | '8xH100' is 8 GPUs: name one, h100_sxm
H100x8 | h100_sxm, and say how many
8 x A100-40GB | a100_sxm_40gb
2×RTX 4090 | rtx_4090
H100:8 | h100_sxm
3050 | did you mean rtx_3060
RTX 3050 | did you mean rtx_3060
h2000 | did you mean h200_sxm
RTX 3080 12GB | rtx_3080 has 10 GiB of memory, not the 12
H100 96GB | did you mean h100_nvl
MI300 | did you mean mi300a, mi300x
H20-3e | h20
titan | kernelcast collect --specs
RX 7900 XTX | RDNA
rx7900xtx | RDNA
AMD Radeon RX 7900 XTX | RDNA
NVIDIA GeForce RTX 4090 Laptop GPU | laptop
NVIDIA H100 80GB HBM3 MIG 1g.10gb | MIG
TPU v5e | neither an NVIDIA GPU nor an AMD Instinct
M3 Max | neither an NVIDIA GPU nor an AMD Instinct
Gaudi 3 | neither an NVIDIA GPU nor an AMD Instinct
"""


def rows(table: str) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in line.split(" | ")) for line in table.strip().splitlines()]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")


def test_the_tables_are_as_long_as_promised() -> None:
    assert len({row[0] for table in (MODELS, WITHOUT_KERNELS, REFUSED_MODELS) for row in rows(table)}) >= 150
    assert len({row[0] for table in (GPUS, REFUSED_GPUS) for row in rows(table)}) >= 80


@pytest.mark.parametrize(("name", "stem", "formats"), rows(MODELS))
def test_a_model_is_found_with_its_formats(name: str, stem: str, formats: str) -> None:
    found = model(name)
    assert (found.layers, found.hidden, found.vocab) == (model(stem).layers, model(stem).hidden, model(stem).vocab)
    assert found.tied_embeddings == model(stem).tied_embeddings
    assert Precision.of(found).label == formats
    assert found.name in (stem, name)  # the name as given says the format


@pytest.mark.parametrize(("name", "stem"), rows(TRACED_MODELS))
def test_a_model_that_is_traced_alone_is_found(name: str, stem: str) -> None:
    assert config(name)[0] == stem


@pytest.mark.parametrize(("name", "stem", "method"), rows(WITHOUT_KERNELS))
def test_a_format_without_kernels_needs_another(name: str, stem: str, method: str) -> None:
    found = model(name)
    assert found.layers == model(stem).layers
    with pytest.raises(KernelcastError, match=f"ships as {method} weights.*; give `dtype`"):
        Precision.of(found)
    assert Precision.of(found, "int4").label == "int4"


@pytest.mark.parametrize(("name", "words"), rows(REFUSED_MODELS))
def test_a_model_that_is_not_certain_is_refused(name: str, words: str) -> None:
    with pytest.raises(KernelcastError) as caught:
        model(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300  # a short list, not every name


@pytest.mark.parametrize(
    "name", ["", " ", "/", "a/", "-fp8", "9" * 5000 + "xH100", "h100 " + "9" * 5000 + "gb", "a" * 20_000]
)
def test_an_odd_name_is_refused_in_one_line(name: str) -> None:
    for find in (model, gpu):
        with pytest.raises(KernelcastError):
            find(name)


@pytest.mark.parametrize(("name", "gpu_id"), rows(GPUS))
def test_a_gpu_is_found(name: str, gpu_id: str) -> None:
    assert gpu(name).id == gpu_id


@pytest.mark.parametrize(("name", "words"), rows(REFUSED_GPUS))
def test_a_gpu_that_is_not_certain_is_refused(name: str, words: str) -> None:
    with pytest.raises(KernelcastError) as caught:
        gpu(name)
    assert words in str(caught.value)
    assert "gb300" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_error_for_an_unknown_gpu_says_how_to_describe_one() -> None:
    with pytest.raises(KernelcastError, match=r"TOML file: `kernelcast collect --specs .*docs/new-gpu.md"):
        gpu("rtx 9999")


# ---- the table of names


def test_models_that_share_layers_name_bundled_ones_and_no_two() -> None:
    table = names.same_layers()
    assert set(table) <= set(model_ids())
    listed = [each.lower() for others in table.values() for each in others]
    assert len(set(listed)) == len(listed)


def test_no_spelling_means_two_models() -> None:
    owners: dict[str, set[str]] = {}
    for stem in model_ids():
        if "quantization_config" not in bundled(stem) or "_base" not in bundled(stem):
            for name in names_of(stem):
                owners.setdefault(names.key_of(names.parts_of(name)[1]), set()).add(stem)
    assert {key: stems for key, stems in owners.items() if len(stems) > 1} == {}


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("qwq-32b", "Qwen/QwQ-32B"),
        ("qwen2.5 coder 32b instruct", "Qwen/Qwen2.5-Coder-32B-Instruct"),
        ("/nowhere/at-all", "/nowhere/at-all"),
        ("unsloth/Qwen3-14B", "unsloth/Qwen3-14B"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen2.5-72B-Instruct-AWQ"),
    ],
)
def test_an_engine_is_started_with_the_model_that_was_named(name: str, hub: str) -> None:
    assert hub_name(name) == hub


def test_the_end_of_a_name_sets_bytes_and_formats() -> None:
    """4 bits and 2 bytes of scale for 128 numbers; the checkpoint's quantization_config says the same."""
    stored = model("Qwen/Qwen2.5-72B-Instruct-AWQ").quantization
    assert stored is not None
    assert (stored.method, stored.four_bit_bytes) == ("awq", 0.5 + 2 / 128)
    assert config("Qwen/Qwen2.5-72B-Instruct-AWQ")[1]["quantization_config"]["bits"] == 4


# ---- files on this machine

LLAMA = {key: value for key, value in bundled("llama-3.2-1b").items() if key[0] != "_"}


def test_a_cached_config_comes_before_what_the_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--unsloth--Llama-3.2-1B" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 64}
    (snapshot / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantised}))
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = model("unsloth/Llama-3.2-1B")
    assert found.quantization is not None
    assert found.quantization.four_bit_bytes == 0.5 + 2 / 64
    assert Precision.of(found).label == "int4"


def test_a_folder_of_model_optimizer_says_its_formats_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert Precision.of(model(tmp_path)).label == "bf16"
    quantised = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantised}))
    assert Precision.of(model(tmp_path)).label == "fp8, KV cache fp8"
