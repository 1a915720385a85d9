#!/usr/bin/env bash
# install.sh VENV: SGLang for tests on a machine without a GPU, in a virtual environment of its own, as it pins its
# dependencies exactly. Only what is imported is installed (about 1.6 GB), so `pip check` fails there; ./shim does the
# rest. About a minute.
set -euo pipefail
python3 -m venv "$1"
pip=("$1/bin/python" -m pip install --quiet)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps sglang==0.5.23 compressed-tensors==0.18.0 torchvision==0.28.0 xgrammar==0.2.7
"${pip[@]}" transformers==5.19.0 tokenizers==0.23.2 numpy pillow fastapi 'uvicorn>=0.51' uvloop orjson 'pyzmq>=25.1.2' \
    psutil pydantic requests aiohttp msgspec setproctitle 'prometheus-client>=0.20' python-multipart \
    partial_json_parser packaging tqdm einops sentencepiece==0.2.1 tiktoken pybase64 xxhash IPython dill \
    apache-tvm-ffi==0.1.11 loguru gguf openai==2.8.0 jsonschema soundfile==0.13.1 decord2
