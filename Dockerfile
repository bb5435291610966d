# asyncrl from this source tree, for CPUs and CUDA.  Built by no test, but what it names is looked for: tests/project/test_dockerfile.py.
#   docker build -t asyncrl .
#   docker build -t asyncrl --build-arg EXTRAS=agents,parquet,lora,vllm,deepspeed .
#   docker run --rm -v "$PWD:/work" asyncrl new sums
#   docker run --rm --shm-size 8g --gpus all -v "$PWD:/work" asyncrl run sums/config.toml
FROM python:3.11-slim
# A C compiler: triton and DeepSpeed build operators when they start.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=agents,parquet,lora
# Options of pip, as in --index-url with PyTorch's index of CPU wheels: the default build brings CUDA.
ARG TORCH_OPTIONS=""
RUN pip install --no-cache-dir torch==2.13.0 ${TORCH_OPTIONS}
COPY . /src
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && rm -rf /src
ENV OMP_NUM_THREADS=1
WORKDIR /work
ENTRYPOINT ["asyncrl"]
