# Build:  docker build -t imagenet-cls .
# Train:  docker run --rm --gpus all --shm-size=16g -v /path/to/imagenet:/workspace/data/imagenet \
#             -v "$PWD/work_dirs:/workspace/work_dirs" imagenet-cls train resnet50 --gpus 8
# The CUDA libraries come with PyTorch's wheels; the host needs an NVIDIA driver and the NVIDIA Container Toolkit.
FROM python:3.13-slim-bookworm

# For train.compile: Triton compiles its launcher in C when a run starts.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/imagenet-cls
RUN pip install --no-cache-dir /opt/imagenet-cls

WORKDIR /workspace
ENTRYPOINT ["imagenet-cls"]
CMD ["--help"]
