# docker build -t cleanrl_zoo .
# docker run --rm -v "$PWD/runs:/zoo/runs" cleanrl_zoo algos/ppo_continuous.py --env Hopper-v4
FROM python:3.11-slim
# g++ for --compile; EGL and OSMesa to record videos without a display
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git libegl1 libgl1 libosmesa6 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /zoo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY cleanrl_zoo cleanrl_zoo
# torch alone first: give --build-arg TORCH_INDEX_URL=… for the index of a CPU-only build, which is much smaller
ARG TORCH_INDEX_URL=""
# --build-arg EXTRAS="video,report,llm,atari,box2d" for all that the files in algos/ can use
ARG EXTRAS="video,report"
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -c constraints.txt torch \
 && pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"
COPY . .
ENTRYPOINT ["python"]
CMD ["algos/ppo_continuous.py", "--help"]
