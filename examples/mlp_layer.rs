//! The MLP of a transformer's layer, tensor-parallel: by the matrix product that is fused with its
//! all-reduce, and by the usual product, NCCL's all-reduce and RMSNorm.
//!
//! ```text
//! cargo xtask run mlp_layer  # every GPU and Llama-70B's sizes, or four simulated ones and small
//! cargo xtask run mlp_layer --model qwen-32b --tokens 1,64,4096
//! DEVCOMM_SIMULATE=2 cargo xtask run mlp_layer --tokens 7,300
//! torchrun --no-python --nproc-per-node 4 -- ./mlp_layer
//! ```
//!
//! ```text
//! h = silu(x * up^T)              each rank has some rows of `up`: these columns of h
//! residual += sum of h * down^T   each rank has these columns of `down`; summed over the ranks
//! y = rmsnorm(residual) * norm
//! ```
//!
//! A layer with a gate multiplies h by a third product, which is left out here. Results are
//! compared with a reference in f64: all of a small layer, some tokens of a large one. Times are
//! those of CUDA graphs; the weights of a large layer do not stay in L2 until the next one.
//! `devcomm-bench gemm-allreduce` measures the product with its all-reduce, also against cuBLASLt.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use devcomm::kernels::collectives::rmsnorm::QuantisedArgs;
use devcomm::{
    Activation, Buffer, Collective, Collectives, DeviceSlice, Gemm, GemmAllReduce, KERNELS, Rank,
    ReduceOp, Stream, Window, World, kernels,
};
use devcomm_testing::machines::run;
use devcomm_testing::mlp::{Results, Weights, inputs};
use half::bf16;

const EPS: f32 = 1e-5;
/// Tokens of a large layer that are checked.
const SAMPLES: usize = 2;
/// Layers in a graph, and the number of its launches that are timed; the median counts.
const LAYERS: usize = 20;
const ROUNDS: usize = 11;

/// The MLP of a transformer's layer, tensor-parallel.
#[derive(Parser)]
struct Options {
    /// Sizes of the layer [default: llama-70b; simulated small]
    #[arg(long, value_enum)]
    model: Option<Model>,
    /// Tokens, comma-separated [default: 1,16,128,2048; simulated 1,20]
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    Small,
    #[value(name = "llama-70b")]
    Llama70b,
    #[value(name = "qwen-32b")]
    Qwen32b,
}

/// The kernels that compute the layer from `h` on.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// `devcomm::GemmAllReduce`, then `kernels::rmsnorm`.
    GemmAllReduce,
    /// `devcomm::Gemm`, then `devcomm::Collectives::all_reduce_rmsnorm`.
    AllReduceRmsnorm,
    /// `devcomm::Gemm`, `ncclAllReduce` on a symmetric window, `kernels::rmsnorm`.
    Nccl,
}

const FORMS: [Form; 3] = [Form::GemmAllReduce, Form::AllReduceRmsnorm, Form::Nccl];

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        rank.communicator()?.require_single_lsa_team()?;
        let (model, tokens): (_, &[usize]) = match rank.is_simulated() {
            true => (Model::Small, &[1, 20]),
            false => (Model::Llama70b, &[1, 16, 128, 2048]),
        };
        let model = options.model.unwrap_or(model);
        let tokens = if options.tokens.is_empty() { tokens } else { &options.tokens };
        ensure!(!tokens.contains(&0), "--tokens 0: a layer has at least one token");
        for &tokens in tokens {
            Layer::new(rank, model, tokens)?.compare(model)?;
        }
        Ok(())
    })
}

/// A rank's part of the layer.
struct Layer<'a> {
    rank: &'a Rank,
    stream: Stream,
    gemm: Gemm,
    gemm_all_reduce: GemmAllReduce,
    collectives: Collectives,
    /// Tokens, this rank's columns of `h`, and the elements of a token.
    shape: [usize; 3],
    x: DeviceSlice<bf16>,
    h: DeviceSlice<bf16>,
    y: Window<bf16>,
    residual: DeviceSlice<bf16>,
    up: DeviceSlice<bf16>,
    down: DeviceSlice<bf16>,
    norm: DeviceSlice<bf16>,
    weights: Weights,
}

impl<'a> Layer<'a> {
    /// Allocates and fills a rank's part. *Collective*.
    fn new(rank: &'a Rank, model: Model, tokens: usize) -> Result<Self> {
        let (comm, n_ranks, stream) = (rank.communicator()?, rank.n_ranks(), rank.stream()?);
        let (hidden, intermediate) = match model {
            Model::Small => (128, 64 * n_ranks),
            Model::Llama70b => (8192, 28672),
            Model::Qwen32b => (5120, 27648),
        };
        let columns = intermediate / n_ranks;
        ensure!(
            intermediate.is_multiple_of(8 * n_ranks),
            "{n_ranks} GPUs do not share {intermediate} columns in multiples of 8: use another \
             --model, or another number of GPUs"
        );
        rank.load(&KERNELS)?;
        let memory = |len| Ok::<_, devcomm::Error>(comm.mem_alloc::<bf16>(len)?.device_slice());
        let on_gpu = |weights: &[bf16]| {
            let buffer = memory(weights.len())?;
            buffer.copy_from_host(weights).map(|()| buffer)
        };
        let weights = Weights::new(rank.rank(), hidden, columns);
        let gemm = Gemm::new(&stream)?;
        let gemm_all_reduce = GemmAllReduce::new(comm, &stream, tokens, hidden)?;
        Ok(Self {
            // SAFETY: no kernel writes weights.
            gemm: unsafe { gemm.with_constant_b() },
            // SAFETY: no kernel writes weights.
            gemm_all_reduce: unsafe { gemm_all_reduce.with_constant_b() },
            collectives: Collectives::new(comm)?,
            x: memory(tokens * hidden)?,
            h: memory(tokens * columns)?,
            y: comm.window(tokens * hidden)?,
            residual: memory(tokens * hidden)?,
            up: on_gpu(&weights.up)?,
            down: on_gpu(&weights.down)?,
            norm: on_gpu(&weights.norm)?,
            rank,
            stream,
            shape: [tokens, columns, hidden],
            weights,
        })
    }

    /// Enqueues the layer.
    fn launch(&self, form: Form) -> devcomm::Result<()> {
        let Self { rank, stream, gemm, x, h, y, .. } = self;
        let [tokens, columns, hidden] = self.shape;
        let first = gemm.product(self.shape).activation(Activation::Silu);
        let down = [tokens, hidden, columns];
        first.launch(x, &self.up, h)?;
        if let Form::GemmAllReduce = form {
            self.gemm_all_reduce.launch(h, &self.down, y, down)?;
        } else {
            gemm.launch(h, &self.down, y, down)?;
        }
        match form {
            Form::GemmAllReduce => {}
            Form::AllReduceRmsnorm => return self.all_reduce_rmsnorm(),
            Form::Nccl => rank.communicator()?.all_reduce(y, y, ReduceOp::Sum, stream)?,
        }
        self.rmsnorm()
    }

    /// Enqueues all that follows the products; for few tokens this is one kernel.
    fn all_reduce_rmsnorm(&self) -> devcomm::Result<()> {
        let Self { collectives, residual, norm, y, stream, .. } = self;
        collectives.all_reduce_rmsnorm(y, residual, norm, y, EPS, stream)
    }

    /// Enqueues what follows the all-reduce, in place.
    fn rmsnorm(&self) -> devcomm::Result<()> {
        let [tokens, _, hidden] = self.shape.map(|extent| extent as u32);
        // A cluster of blocks has a thread for each vector of 16 bytes of a token.
        let vectors = hidden / 8;
        let cluster = vectors.div_ceil(256).next_power_of_two();
        let threads = vectors.div_ceil(cluster).next_multiple_of(32);
        let (y, residual, norm) = (&self.y.device_slice(), &self.residual, &self.norm);
        let plain = QuantisedArgs { output: 0, scale: 0 }; // No second, quantised output.
        let kernel =
            kernels::rmsnorm::<bf16>::args(y, residual, norm, y, plain, tokens, hidden, EPS);
        let kernel = kernel.grid(cluster * tokens).block(threads).cluster(cluster).dependent();
        // SAFETY: the buffers have the elements, aligned; dropping a buffer waits for the stream.
        unsafe { kernel.launch(&self.stream) }
    }

    /// Checks and times every form, and prints a row for each. *Collective*.
    fn compare(&self, model: Model) -> Result<()> {
        let Self { rank, gemm, shape: [tokens, columns, hidden], .. } = self;
        let samples = if model == Model::Small { *tokens } else { SAMPLES.min(*tokens) };
        if rank.is_root() {
            let (device, down) = (rank.context().device_name()?, [*tokens, *hidden, *columns]);
            println!("{model:?}, {tokens} tokens of {hidden}, on {} x {device}:", rank.n_ranks());
            println!("h: {columns} columns a rank, by {}", gemm.plan(self.shape)?);
            println!("GemmAllReduce: {}", self.gemm_all_reduce.explain(down)?);
            let Self { y, residual, norm, .. } = self;
            let norm = Collective::all_reduce_rmsnorm(y, residual, norm, y);
            let norm = self.collectives.explain(&norm)?;
            println!("AllReduceRmsnorm: {}, then {norm}", gemm.plan(down)?);
            println!("                  checked  #wrong  us");
        }
        for form in FORMS {
            let wrong = self.count_wrong(form, samples)?;
            let time = match rank.is_simulated() {
                true => "-".to_owned(),
                false => format!("{:.2}", self.time(form)?),
            };
            if rank.is_root() {
                println!("{:16} {samples:8} {wrong:7}  {time}", format!("{form:?}"));
            }
            ensure!(wrong == 0, "{form:?}: {wrong} elements are wrong, over all ranks");
        }
        if rank.is_root() {
            println!();
        }
        Ok(())
    }

    /// Returns the number of wrong elements of `samples` tokens, over all ranks.
    fn count_wrong(&self, form: Form, samples: usize) -> Result<usize> {
        let Self { rank, shape: [tokens, columns, hidden], .. } = *self;
        let [x, residual] = inputs(tokens, hidden);
        self.x.copy_from_host(&x)?;
        self.residual.copy_from_host(&residual)?;
        // An element that no rank writes stays NaN.
        self.h.fill_bytes(0xff)?;
        self.y.fill_bytes(0xff)?;
        rank.barrier()?;
        self.launch(form)?;
        self.stream.synchronize()?;
        let mut h = vec![bf16::NAN; tokens * columns];
        let (mut y, mut sum) = (residual.clone(), residual.clone());
        self.h.copy_to_host(&mut h)?;
        self.y.copy_to_host(&mut y)?;
        self.residual.copy_to_host(&mut sum)?;
        let results = Results { x: &x, residual: &residual, h: &h, got: [&y, &sum] };
        let wrong = self.weights.count_wrong(rank, results, samples, EPS)?;
        Ok(rank.all_gather(&[wrong])?.concat().iter().sum())
    }

    /// Returns the microseconds of a layer: the median of a graph's launches, on the slowest rank.
    fn time(&self, form: Form) -> Result<f32> {
        let Self { rank, stream, .. } = self;
        let graph = stream.capture(|| (0..LAYERS).try_for_each(|_| self.launch(form)))?;
        let (begin, end) = (rank.context().event()?, rank.context().event()?);
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            rank.barrier()?;
            // The first launch is not timed: it aligns the ranks' GPUs.
            graph.launch(stream)?;
            stream.record(&begin)?;
            graph.launch(stream)?;
            stream.record(&end)?;
            stream.synchronize()?;
            let us = end.elapsed_ms(&begin)? * 1e3 / LAYERS as f32;
            times.push(rank.all_gather(&[us])?.concat().into_iter().fold(0.0, f32::max));
        }
        times.sort_by(f32::total_cmp);
        Ok(times[ROUNDS / 2])
    }
}
