// Times all-reduces of FlashInfer, for `devcomm-bench .. --peers flashinfer=PROGRAM`: its Lamport
// kernels (one-shot and two-shot, alone and with residual and RMSNorm), which are TensorRT-LLM's,
// and its copy of vLLM's custom all-reduce. bench/peers/build.sh compiles it with FlashInfer's
// headers; it needs neither Python nor torch, and runs all GPUs in one process with peer access.
//
// The argument is a job (JSON). The program prints a line of JSON for each case and algorithm: the time of
// each round on the slowest GPU and the number of wrong elements, or why it was left out.

#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <flashinfer/comm/trtllm_allreduce_fusion.cuh>
#include <flashinfer/comm/vllm_custom_all_reduce.cuh>

namespace fi = flashinfer::trtllm_allreduce_fusion;

#define CUDA(call)                                                                        \
  do {                                                                                    \
    cudaError_t status = (call);                                                          \
    if (status != cudaSuccess) {                                                          \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));                     \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)

// The text after `"key":` in the job; empty if the key is missing.
static std::string after(const std::string& job, const std::string& key) {
  size_t at = job.find("\"" + key + "\":");
  return at == std::string::npos ? "" : job.substr(at + key.size() + 3);
}

static long number(const std::string& job, const char* key) { return atol(after(job, key).c_str()); }

// The numbers of a list, also of a list of lists.
static std::vector<long> numbers(const std::string& text) {
  std::vector<long> found;
  int depth = 0;
  for (size_t i = 0; i < text.size(); i++) {
    depth += text[i] == '[' ? 1 : text[i] == ']' ? -1 : 0;
    if (depth == 0) break;
    if (isdigit(text[i])) {
      char* end;
      found.push_back(strtol(&text[i], &end, 10));
      i = end - &text[0] - 1;
    }
  }
  return found;
}

struct Job {
  long iters, warmup, check, graph, rounds;
  bool flashinfer, vllm;
};

// Small integers, whose sums are exact.
static float input(int rank, size_t i) { return float(int((i * 7 + rank * 5 + i / 977) % 17) - 8); }
static float weight(size_t i) { return 0.5f + float(i % 5) * 0.25f; }

// The 16-bit elements of a row for FlashInfer's kernels, and the most bytes of a message.
constexpr long kRow = 8192;
constexpr size_t kMost = size_t(64) << 20;

struct Gpus {
  int n;
  std::vector<cudaStream_t> streams;
  std::barrier<> barrier;
  explicit Gpus(int n) : n(n), streams(n), barrier(n) {
    for (int r = 0; r < n; r++) {
      CUDA(cudaSetDevice(r));
      for (int peer = 0; peer < n; peer++) {
        if (peer != r) CUDA(cudaDeviceEnablePeerAccess(peer, 0));
      }
      CUDA(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    }
  }
  // Runs a function on a thread for each GPU.
  void each(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < n; r++) {
      threads.emplace_back([&, r] {
        CUDA(cudaSetDevice(r));
        body(r);
      });
    }
    for (auto& thread : threads) thread.join();
  }
};

// Memory of all GPUs.
template <typename T>
struct Memory {
  std::vector<T*> on;
  Memory(Gpus& gpus, size_t count) : on(gpus.n) {
    for (int r = 0; r < gpus.n; r++) {
      CUDA(cudaSetDevice(r));
      CUDA(cudaMalloc(&on[r], count * sizeof(T)));
      CUDA(cudaMemset(on[r], 0, count * sizeof(T)));
    }
  }
  ~Memory() {
    for (T* pointer : on) cudaFree(pointer);
  }
};

// Times `launch` on all GPUs, and prints a row.
static void measure(Gpus& gpus, const Job& job, const std::string& row,
                    const std::function<void(int)>& launch,
                    const std::function<void(int)>& captured,
                    const std::function<void(int)>& poison,
                    const std::function<long(int)>& wrong_elements) {
  std::vector<std::vector<float>> times(gpus.n);
  std::vector<long> wrong(gpus.n, 0);
  gpus.each([&](int r) {
    cudaStream_t stream = gpus.streams[r];
    for (int check = 0; check < std::max(job.check, 1l); check++) {
      if (job.check) poison(r);
      gpus.barrier.arrive_and_wait();
      launch(r);
      CUDA(cudaStreamSynchronize(stream));
      if (job.check) wrong[r] += wrong_elements(r);
    }
    for (int i = 0; i < job.warmup; i++) launch(r);
    CUDA(cudaStreamSynchronize(stream));
    gpus.barrier.arrive_and_wait();
    cudaGraphExec_t graph = nullptr;
    if (job.graph) {
      cudaGraph_t recorded;
      CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < job.iters; i++) launch(r);
      CUDA(cudaStreamEndCapture(stream, &recorded));
      CUDA(cudaGraphInstantiate(&graph, recorded, 0));
      captured(r);
      gpus.barrier.arrive_and_wait();
    }
    auto once = [&] {
      if (graph) {
        CUDA(cudaGraphLaunch(graph, stream));
      } else {
        launch(r);
      }
    };
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    once();
    CUDA(cudaStreamSynchronize(stream));
    long launches = job.graph ? job.graph : job.iters;
    long operations = job.graph ? job.graph * job.iters : job.iters;
    for (int round = 0; round < job.rounds; round++) {
      gpus.barrier.arrive_and_wait();
      // This call aligns the GPUs, and is not timed.
      once();
      CUDA(cudaEventRecord(begin, stream));
      for (int i = 0; i < launches; i++) once();
      CUDA(cudaEventRecord(end, stream));
      CUDA(cudaStreamSynchronize(stream));
      float ms;
      CUDA(cudaEventElapsedTime(&ms, begin, end));
      times[r].push_back(ms * 1e3f / float(operations));
    }
    if (graph) CUDA(cudaGraphExecDestroy(graph));
  });
  long all = 0;
  for (long of_rank : wrong) all += of_rank;
  printf("{%s, \"wrong\": %s, \"times_us\": [", row.c_str(),
         job.check ? std::to_string(all).c_str() : "null");
  for (int round = 0; round < job.rounds; round++) {
    float slowest = 0;
    for (auto& of_rank : times) slowest = std::max(slowest, of_rank[round]);
    printf("%s%.4f", round ? ", " : "", slowest);
  }
  printf("]}\n");
  fflush(stdout);
}

// FlashInfer's workspace for messages of up to `most` elements, as its Python allocates it: data and
// flags (of 256 blocks) of the two-shot kernel, and three Lamport buffers, filled with -0, which
// marks unwritten elements. `flags` are its counters, and at index 3 the bytes of a Lamport buffer;
// `pointers` are each part's addresses on all GPUs, and that of the flags.
template <typename T>
struct Workspace {
  std::vector<std::unique_ptr<Memory<char>>> parts;
  std::unique_ptr<Memory<int>> flags;
  std::unique_ptr<Memory<void*>> pointers;
  Workspace(Gpus& gpus, size_t most) {
    size_t bytes = (size_t(gpus.n) * most * sizeof(T) + 15) / 16 * 16;
    for (size_t size : {bytes, size_t(gpus.n) * 256 * 4, 3 * bytes}) {
      parts.push_back(std::make_unique<Memory<char>>(gpus, size));
    }
    flags = std::make_unique<Memory<int>>(gpus, 5);
    pointers = std::make_unique<Memory<void*>>(gpus, 3 * gpus.n + 1);
    std::vector<T> empty(3 * bytes / sizeof(T), T(-0.0f));
    for (int r = 0; r < gpus.n; r++) {
      CUDA(cudaSetDevice(r));
      CUDA(cudaMemcpy(parts[2]->on[r], empty.data(), 3 * bytes, cudaMemcpyHostToDevice));
      int state[5] = {0, 0, 0, int(bytes), 0};
      CUDA(cudaMemcpy(flags->on[r], state, sizeof state, cudaMemcpyHostToDevice));
      std::vector<void*> all;
      for (auto& part : parts) all.insert(all.end(), part->on.begin(), part->on.end());
      all.push_back(flags->on[r]);
      CUDA(cudaMemcpy(pointers->on[r], all.data(), all.size() * 8, cudaMemcpyHostToDevice));
    }
  }
};

template <typename T>
struct Buffers {
  Memory<T> in, out, residual, sum, gamma;
  size_t most;
  Buffers(Gpus& gpus, size_t most, bool norm)
      : in(gpus, most), out(gpus, most), residual(gpus, norm ? most : 1), sum(gpus, norm ? most : 1),
        gamma(gpus, 1 << 16), most(most) {
    std::vector<T> host(most);
    for (int r = 0; r < gpus.n; r++) {
      CUDA(cudaSetDevice(r));
      for (size_t i = 0; i < most; i++) host[i] = T(input(r, i));
      CUDA(cudaMemcpy(in.on[r], host.data(), most * sizeof(T), cudaMemcpyHostToDevice));
      if (norm) {
        // The residual is the input of a rank that does not exist.
        for (size_t i = 0; i < most; i++) host[i] = T(input(99, i));
        CUDA(cudaMemcpy(residual.on[r], host.data(), most * sizeof(T), cudaMemcpyHostToDevice));
      }
      std::vector<T> weights(1 << 16);
      for (size_t i = 0; i < weights.size(); i++) weights[i] = T(weight(i));
      CUDA(cudaMemcpy(gamma.on[r], weights.data(), weights.size() * sizeof(T),
                      cudaMemcpyHostToDevice));
    }
  }
  // Overwrites a GPU's results, before the next launch on its stream.
  void poison(Gpus& gpus, int r, size_t count, bool norm) {
    CUDA(cudaMemsetAsync(out.on[r], 0xff, count * sizeof(T), gpus.streams[r]));
    if (norm) CUDA(cudaMemsetAsync(sum.on[r], 0xff, count * sizeof(T), gpus.streams[r]));
  }
  // The number of wrong elements of a GPU: of the sums, and if `hidden`, of the normalised rows too.
  long wrong(Gpus& gpus, int r, size_t count, size_t hidden) {
    std::vector<T> got(count), sums(hidden ? count : 0);
    CUDA(cudaMemcpy(got.data(), out.on[r], count * sizeof(T), cudaMemcpyDeviceToHost));
    long wrong = 0;
    auto total = [&](size_t i) {
      float sum = hidden ? input(99, i) : 0;
      for (int peer = 0; peer < gpus.n; peer++) sum += input(peer, i);
      return sum;
    };
    if (!hidden) {
      for (size_t i = 0; i < count; i++) wrong += float(got[i]) != total(i);
      return wrong;
    }
    CUDA(cudaMemcpy(sums.data(), sum.on[r], count * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t row = 0; row < count; row += hidden) {
      double squares = 0;
      for (size_t i = 0; i < hidden; i++) squares += double(total(row + i)) * total(row + i);
      double scale = 1 / std::sqrt(squares / double(hidden) + 1e-5);
      for (size_t i = 0; i < hidden; i++) {
        double right = total(row + i) * scale * weight(i);
        wrong += !(std::abs(double(float(got[row + i])) - right) <= 0.01 * std::abs(right) + 1e-3);
        wrong += float(sums[row + i]) != total(row + i);
      }
    }
    return wrong;
  }
};

// Launches FlashInfer's kernel for the number of ranks, with sums in f32 and with programmatic
// dependent launch.
template <typename T, fi::AllReduceFusionPattern Pattern>
static cudaError_t launch_pattern(const fi::AllReduceFusionParams<T>& params) {
  constexpr bool kSumsInF32 = !std::is_same_v<T, float>;
  switch (params.nranks) {
    case 2:
      return fi::allreduce_fusion_kernel_launcher<Pattern, T, 2, kSumsInF32>(params, true);
    case 4:
      return fi::allreduce_fusion_kernel_launcher<Pattern, T, 4, kSumsInF32>(params, true);
    case 8:
      return fi::allreduce_fusion_kernel_launcher<Pattern, T, 8, kSumsInF32>(params, true);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T>
static cudaError_t launch_kernel(const fi::AllReduceFusionParams<T>& params, bool norm) {
  using Pattern = fi::AllReduceFusionPattern;
  return norm ? launch_pattern<T, Pattern::kARResidualRMSNorm>(params)
              : launch_pattern<T, Pattern::kAllReduce>(params);
}

template <typename T>
static void flashinfer_case(Gpus& gpus, const Job& job, Workspace<T>& workspace,
                            Buffers<T>& buffers, const std::string& row, size_t count,
                            long hidden, bool norm) {
  for (bool oneshot : {true, false}) {
    size_t tokens = count / hidden;
    std::string name = row + ", \"variant\": \"flashinfer\", \"algorithm\": \"" +
                       (oneshot ? "one-shot" : "two-shot") + "\"";
    // Two-shot gives each rank some of the tokens.
    if (!oneshot && tokens < size_t(gpus.n)) continue;
    auto launch = [&](int r) {
      fi::AllReduceFusionParams<T> params{};
      params.nranks = gpus.n;
      params.rank = r;
      params.size = int(count);
      params.hidden_dim = int(hidden);
      params.workspace = workspace.pointers->on[r];
      params.allreduce_in = buffers.in.on[r];
      params.allreduce_out = norm ? nullptr : buffers.out.on[r];
      params.residual_in = norm ? buffers.residual.on[r] : nullptr;
      params.residual_out = norm ? buffers.sum.on[r] : nullptr;
      params.norm_out = norm ? buffers.out.on[r] : nullptr;
      params.rms_gamma = norm ? buffers.gamma.on[r] : nullptr;
      params.rms_eps = 1e-5f;
      params.use_oneshot = oneshot;
      params.stream = gpus.streams[r];
      params.pattern = norm ? fi::AllReduceFusionPattern::kARResidualRMSNorm
                            : fi::AllReduceFusionPattern::kAllReduce;
      CUDA(launch_kernel<T>(params, norm));
    };
    measure(gpus, job, name, launch, [](int) {},
            [&](int r) { buffers.poison(gpus, r, count, norm); },
            [&](int r) { return buffers.wrong(gpus, r, count, norm ? hidden : 0); });
  }
}

template <typename T>
static void vllm_case(Gpus& gpus, const Job& job, Buffers<T>& buffers, Memory<char>& signals,
                      const std::string& row, size_t count) {
  std::vector<vllm::Signal*> pointers;
  for (char* signal : signals.on) pointers.push_back(reinterpret_cast<vllm::Signal*>(signal));
  // An entry for the registered buffer, and one for each call in the graph.
  const size_t entries = 1 + size_t(job.iters);
  Memory<vllm::RankData> data(gpus, entries);
  std::vector<std::unique_ptr<vllm::CustomAllreduce>> all;
  std::vector<void*> inputs(buffers.in.on.begin(), buffers.in.on.end());
  for (int r = 0; r < gpus.n; r++) {
    CUDA(cudaSetDevice(r));
    all.push_back(std::make_unique<vllm::CustomAllreduce>(
        pointers.data(), data.on[r], entries * sizeof(vllm::RankData), r, gpus.n));
    all[r]->register_buffer(inputs.data());
  }
  auto launch = [&](int r) {
    all[r]->template allreduce<T>(gpus.streams[r], buffers.in.on[r], buffers.out.on[r], int(count),
                                  vllm::kMaxBlocks);
  };
  // A graph's calls read their peers' addresses from entries that are written after the capture.
  auto captured = [&](int r) {
    vllm::RankData entry{};
    for (int peer = 0; peer < gpus.n; peer++) entry.ptrs[peer] = inputs[peer];
    std::vector<vllm::RankData> entries(all[r]->graph_unreg_buffers_.size(), entry);
    CUDA(cudaMemcpy(all[r]->d_rank_data_base_, entries.data(),
                    entries.size() * sizeof(vllm::RankData), cudaMemcpyHostToDevice));
    all[r]->d_rank_data_base_ += entries.size();
    all[r]->graph_unreg_buffers_.clear();
  };
  measure(gpus, job, row + ", \"variant\": \"vllm\", \"algorithm\": \"custom all-reduce\"", launch,
          captured, [&](int r) { buffers.poison(gpus, r, count, false); },
          [&](int r) { return buffers.wrong(gpus, r, count, 0); });
}

template <typename T>
static void run(Gpus& gpus, const Job& job, const std::string& text, const char* type) {
  constexpr long kVector = 16 / sizeof(T);
  std::string counts = after(text, "counts"), norms = after(text, "rmsnorm");
  bool norm = !norms.empty();
  std::string of_type = after((norm ? norms : counts).substr(0, text.find("\"variants\"")), type);
  std::vector<long> list = of_type.empty() ? std::vector<long>() : numbers(of_type);
  if (list.empty()) return;
  size_t most = 0;
  for (size_t i = 0; i < list.size(); i += norm ? 2 : 1) {
    size_t count = norm ? list[i] * list[i + 1] : list[i];
    if (count * sizeof(T) <= kMost) most = std::max(most, count);
  }
  if (most == 0) return;
  Workspace<T> workspace(gpus, most);
  Buffers<T> buffers(gpus, most, norm);
  Memory<char> signals(gpus, sizeof(vllm::Signal) + most * sizeof(T));
  for (size_t i = 0; i < list.size(); i += norm ? 2 : 1) {
    size_t count = norm ? list[i] * list[i + 1] : list[i];
    std::string row = std::string("\"type\": \"") + type +
                      "\", \"size\": " + std::to_string(count * sizeof(T));
    if (norm) {
      row += ", \"tokens\": " + std::to_string(list[i]) +
             ", \"hidden\": " + std::to_string(list[i + 1]);
    }
    bool fits = count * sizeof(T) <= kMost && count % kVector == 0;
    for (const char* variant : {"flashinfer", "vllm"}) {
      bool wanted = variant[0] == 'f' ? job.flashinfer : job.vllm && !norm;
      if (wanted && !fits) {
        printf("{%s, \"variant\": \"%s\", \"left_out\": \"messages of whole vectors, up to 64 MiB\"}\n",
               row.c_str(), variant);
      }
    }
    if (!fits) continue;
    long whole = kRow * 2 / long(sizeof(T));
    long hidden = norm ? list[i + 1] : long(count) % whole == 0 ? whole : long(count);
    if (job.flashinfer && hidden / kVector > 8 * 1024) {
      printf("{%s, \"variant\": \"flashinfer\", \"left_out\": \"tokens of up to 8192 vectors\"}\n",
             row.c_str());
    } else if (job.flashinfer) {
      flashinfer_case<T>(gpus, job, workspace, buffers, row, count, hidden, norm);
    }
    if (job.vllm && !norm) vllm_case<T>(gpus, job, buffers, signals, row, count);
  }
}

int main(int argc, char** argv) {
  const char* rank = getenv("RANK");
  const char* world = getenv("WORLD_SIZE");
  if (argc < 2 || !world) {
    fprintf(stderr, "devcomm-bench --peers flashinfer=%s starts this program\n", argv[0]);
    return 1;
  }
  // The first process runs all GPUs.
  if (rank && atoi(rank) > 0) return 0;
  std::string text;
  for (const char* at = argv[1]; *at; at++) {
    if (*at != ' ') text += *at;
  }
  std::string variants = after(text, "variants");
  variants = variants.substr(0, variants.find(']'));
  Job job{number(text, "iters"), number(text, "warmup"), number(text, "check"),
          number(text, "graph"), number(text, "rounds"),
          variants.find("flashinfer") != std::string::npos,
          variants.find("vllm") != std::string::npos};
  Gpus gpus(atoi(world));
  run<float>(gpus, job, text, "f32");
  run<half>(gpus, job, text, "f16");
  run<nv_bfloat16>(gpus, job, text, "bf16");
  return 0;
}
