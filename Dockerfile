# NVIDIA's NeMo image: torch, Transformer Engine, apex and Megatron, all of which stay as they are.
ARG IMAGE=nvcr.io/nvidia/nemo:26.08
FROM ${IMAGE}
COPY . /opt/megatron_ext
RUN PIP_CONSTRAINT= python -m pip install --no-cache-dir /opt/megatron_ext
RUN python -m megatron_ext doctor
