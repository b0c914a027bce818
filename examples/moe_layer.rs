//! A layer of a mixture of experts, whose experts are distributed over the ranks.
//!
//! ```text
//! cargo xtask run moe_layer                      # every GPU, or four simulated ones
//! cargo xtask run moe_layer --tokens 1 --top-k 2 # one token of each rank
//! cargo xtask run moe_layer --throughput         # the form for many tokens
//! DEVCOMM_SIMULATE=8 cargo xtask run moe_layer   # eight simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./moe_layer
//! ```
//!
//! Each rank has tokens of its own, and the same number of experts. An expert is an MLP of two
//! matrices, `down * silu(up * x)`. A router chooses the experts of each token, here by random
//! logits. Then `devcomm::ExpertParallel` sends each token's row to the ranks of its experts and
//! puts the rows there in the order of the experts, `devcomm::GroupedGemm` multiplies the rows of
//! all experts by their matrices, and the results return: a token becomes itself plus the weighted
//! sum of its experts' results. The host never learns how many rows an expert has.
//!
//! Every element is compared with a reference computed in f64, and with the same layer by
//! `ncclAlltoAll` and a product for each expert.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use devcomm::{
    Activation, Buffer, ExpertParallelOptions, Gemm, GroupedGemm, Rank, Stream, SymmetricBuffer,
    Tokens, World,
};
use devcomm_testing::machines::run;
use devcomm_testing::numbers::{input, inputs};
use half::bf16;

/// A layer of a mixture of experts, whose experts are distributed over the ranks.
#[derive(Parser)]
struct Options {
    /// Tokens of each rank [default: 256; simulated 5]
    #[arg(long)]
    tokens: Option<usize>,
    /// Elements of a token, a multiple of 8 [default: 1024; simulated 64]
    #[arg(long)]
    hidden: Option<usize>,
    /// Elements between the two matrices of an expert [default: 512; simulated 40]
    #[arg(long)]
    inner: Option<usize>,
    /// Experts of each rank
    #[arg(long, default_value_t = 4)]
    experts: usize,
    /// Experts of each token
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// Takes the form of `ExpertParallel` for many tokens
    #[arg(long)]
    throughput: bool,
}

/// Sizes of a layer.
#[derive(Clone, Copy)]
struct Layer {
    tokens: usize,
    hidden: usize,
    inner: usize,
    /// Experts of all ranks.
    experts: usize,
    top_k: usize,
    throughput: bool,
}

/// Tokens of a rank, with their routing.
struct Inputs {
    x: Vec<bf16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

/// The matrices of a rank's experts, one after the other, as `nn.Linear` keeps them.
struct Experts {
    /// `inner x hidden` each.
    up: SymmetricBuffer<bf16>,
    /// `hidden x inner` each.
    down: SymmetricBuffer<bf16>,
}

/// An element of the reference, and the largest error of a result.
#[derive(Clone, Copy)]
struct Expected {
    value: f64,
    error: f64,
}

/// Seeds of the tokens, the router's logits, and the experts' matrices.
const TOKENS: u64 = 1;
const LOGITS: u64 = 2;
const UP: u64 = 3;
const DOWN: u64 = 4;

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        let sizes = if rank.is_simulated() { [5, 64, 40] } else { [256, 1024, 512] };
        let [tokens, hidden, inner] = sizes;
        let layer = Layer {
            tokens: options.tokens.unwrap_or(tokens),
            hidden: options.hidden.unwrap_or(hidden),
            inner: options.inner.unwrap_or(inner),
            experts: options.experts * rank.n_ranks(),
            top_k: options.top_k,
            throughput: options.throughput,
        };
        let (all, top_k) = (layer.experts, layer.top_k);
        ensure!(top_k <= all, "--top-k {top_k}: a token has each of the {all} experts once");
        layer.run(rank)
    })
}

impl Layer {
    fn run(self, rank: &Rank) -> Result<()> {
        let Self { tokens, hidden, experts, top_k, .. } = self;
        let (me, stream) = (rank.rank(), rank.stream()?);
        let inputs = self.inputs(me);
        let (ours, rows) = self.by_kernels(rank, &inputs, &stream)?;
        let theirs = self.by_nccl(rank, &inputs, &stream)?;

        let expected = self.expected(&inputs);
        let is_right = |(got, Expected { value, error }): (&bf16, &Expected)| {
            (f64::from(*got) - value).abs() <= *error
        };
        // A NaN is wrong too.
        let right = ours.iter().zip(&expected).filter(|pair| is_right(*pair)).count();
        let wrong = ours.len() - right;
        ensure!(wrong == 0, "rank {me}: {wrong} elements are wrong");
        let is_same = |((ours, theirs), Expected { error, .. }): ((&bf16, &bf16), &Expected)| {
            (f64::from(*ours) - f64::from(*theirs)).abs() <= 2.0 * error
        };
        let pairs = ours.iter().zip(&theirs).zip(&expected);
        let different = ours.len() - pairs.filter(|pair| is_same(*pair)).count();
        ensure!(different == 0, "rank {me}: {different} elements differ from ncclAlltoAll's");

        let received = rank.all_gather(&[rows])?.concat();
        if rank.is_root() {
            println!("{tokens} tokens of {hidden} per rank, {top_k} of {experts} experts: 0 wrong");
            println!("rows of the ranks' experts: {received:?}");
        }
        rank.barrier()?;
        Ok(())
    }

    /// Computes the layer by devcomm's kernels. Returns this rank's results, and how many rows its
    /// experts had.
    fn by_kernels(
        self,
        rank: &Rank,
        inputs: &Inputs,
        stream: &Stream,
    ) -> Result<(Vec<bf16>, usize)> {
        let Self { tokens, hidden, inner, experts, top_k, throughput } = self;
        let comm = rank.communicator()?;
        let sizes = ExpertParallelOptions::new(hidden, tokens, experts, top_k);
        // Simulated blocks take time, also without work.
        let sizes = if rank.is_simulated() { sizes.blocks(3).threads(96) } else { sizes };
        let sizes = if throughput { sizes.throughput(usize::MAX) } else { sizes };
        let parallel = sizes.build(comm)?;
        let (gemm, matrices) = (GroupedGemm::new(stream)?, self.experts(rank)?);

        let x = comm.mem_alloc::<bf16>(tokens * hidden)?;
        let ids = comm.mem_alloc::<i32>(tokens * top_k)?;
        let weights = comm.mem_alloc::<f32>(tokens * top_k)?;
        x.copy_from_host(&inputs.x)?;
        ids.copy_from_host(&inputs.ids)?;
        weights.copy_from_host(&inputs.weights)?;

        // Room for the worst routing: all tokens to this rank.
        let most = parallel.most_rows();
        let rows = match throughput {
            true => parallel.rows()?,
            false => comm.mem_alloc::<bf16>(most * hidden)?.device_slice(),
        };
        let between = comm.mem_alloc::<bf16>(most * inner)?;
        let results = comm.mem_alloc::<bf16>(most * hidden)?;
        let output = comm.mem_alloc::<bf16>(tokens * hidden)?;
        // An element that nothing writes stays NaN.
        rows.fill_bytes(0xff)?;
        for buffer in [&between, &results, &output] {
            buffer.fill_bytes(0xff)?;
        }

        let routed = Tokens { count: tokens, input: &x, ids: &ids, weights: &weights };
        let (groups, silu) = (parallel.groups(), Some(Activation::Silu));
        parallel.dispatch(routed, stream)?;
        parallel.group(&rows, stream)?;
        gemm.launch(&rows, &matrices.up, &between, &groups, [most, inner, hidden], silu)?;
        gemm.launch(&between, &matrices.down, &results, &groups, [most, hidden, inner], None)?;
        parallel.combine(&results, &output, Some(&x.device_slice()), stream)?;

        let mut got = vec![bf16::NAN; tokens * hidden];
        stream.copy_to_host(&output, &mut got)?;
        parallel.check()?;
        let mut sizes = vec![0; experts / rank.n_ranks()];
        parallel.groups().sizes.copy_to_host(&mut sizes)?;
        Ok((got, sizes.iter().map(|size| *size as usize).sum()))
    }

    /// Computes the layer by `ncclAlltoAll`, with room for all rows of a rank in each message, and
    /// a product for each expert; the host does the rest. Returns this rank's results.
    fn by_nccl(self, rank: &Rank, inputs: &Inputs, stream: &Stream) -> Result<Vec<bf16>> {
        let Self { tokens, hidden, inner, experts, top_k, .. } = self;
        let (comm, ranks) = (rank.communicator()?, rank.n_ranks());
        let (local, room) = (experts / ranks, tokens * top_k);
        let (gemm, matrices) = (Gemm::new(stream)?, self.experts(rank)?);
        let rows = [comm.mem_alloc(ranks * room * hidden)?, comm.mem_alloc(ranks * room * hidden)?];
        let ids = [comm.mem_alloc::<i32>(ranks * room)?, comm.mem_alloc(ranks * room)?];
        let exchange = |host: &mut Vec<bf16>| {
            rows[0].copy_from_host(host)?;
            comm.all_to_all(&rows[0], &rows[1], stream)?;
            stream.copy_to_host(&rows[1], host)
        };
        let row = |i: usize| i * hidden..(i + 1) * hidden;

        // Each expert of a token has a place in the message to the expert's rank.
        let place = |i: usize| inputs.ids[i] as usize / local * room + i;
        let mut expert_of_row = vec![-1; ranks * room]; // no expert
        let mut host = vec![bf16::ZERO; ranks * room * hidden];
        for (i, id) in inputs.ids.iter().enumerate() {
            expert_of_row[place(i)] = id % local as i32;
            host[row(place(i))].copy_from_slice(&inputs.x[row(i / top_k)]);
        }
        exchange(&mut host)?;
        ids[0].copy_from_host(&expert_of_row)?;
        comm.all_to_all(&ids[0], &ids[1], stream)?;
        stream.copy_to_host(&ids[1], &mut expert_of_row)?;

        for expert in 0..local {
            let is_own = |i: &usize| expert_of_row[*i] == expert as i32;
            let own: Vec<usize> = (0..expert_of_row.len()).filter(is_own).collect();
            if own.is_empty() {
                continue;
            }
            let matrix = expert * hidden * inner..(expert + 1) * hidden * inner;
            let (up, down) = (matrices.up.slice(matrix.clone())?, matrices.down.slice(matrix)?);
            let rows = own.iter().flat_map(|i| host[row(*i)].to_vec());
            let mut results: Vec<bf16> = rows.collect();
            let x = comm.mem_alloc::<bf16>(results.len())?;
            let between = comm.mem_alloc::<bf16>(own.len() * inner)?;
            x.copy_from_host(&results)?;
            let product = gemm.product([own.len(), inner, hidden]).activation(Activation::Silu);
            product.launch(&x, &up, &between)?;
            gemm.launch(&between, &down, &x, [own.len(), hidden, inner])?;
            stream.copy_to_host(&x, &mut results)?;
            for (i, result) in own.iter().zip(results.chunks(hidden)) {
                host[row(*i)].copy_from_slice(result);
            }
        }
        exchange(&mut host)?;
        let sum = |at: usize| {
            let (token, column) = (at / hidden, at % hidden);
            let experts = token * top_k..(token + 1) * top_k;
            let terms =
                experts.map(|i| inputs.weights[i] * host[place(i) * hidden + column].to_f32());
            bf16::from_f32(inputs.x[at].to_f32() + terms.sum::<f32>())
        };
        Ok((0..tokens * hidden).map(sum).collect())
    }

    /// Returns the matrices of this rank's experts.
    fn experts(self, rank: &Rank) -> Result<Experts> {
        let local = self.experts / rank.n_ranks();
        let own = rank.rank() * local..(rank.rank() + 1) * local;
        let matrices = |seed, columns| {
            let host: Vec<_> =
                own.clone().flat_map(|expert| self.matrix(seed, expert, columns)).collect();
            let matrices = rank.communicator()?.mem_alloc(host.len())?;
            matrices.copy_from_host(&host)?;
            Ok::<_, anyhow::Error>(matrices)
        };
        Ok(Experts { up: matrices(UP, self.hidden)?, down: matrices(DOWN, self.inner)? })
    }

    /// Returns a matrix of an expert, small enough that a result is about as large as a token.
    fn matrix(self, seed: u64, expert: usize, columns: usize) -> Vec<bf16> {
        let scale = bf16::from_f64(2.0 / (columns as f64).sqrt());
        let elements = inputs::<bf16>(seed, expert, self.hidden * self.inner);
        elements.into_iter().map(|element| element * scale).collect()
    }

    /// Returns a rank's tokens. Each token has the experts with the largest logits; the experts'
    /// weights are the softmax of these logits.
    fn inputs(self, rank: usize) -> Inputs {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for token in 0..self.tokens {
            let logit = |expert| 4.0 * input::<f32>(LOGITS, rank, token * self.experts + expert);
            let mut all: Vec<_> = (0..self.experts).map(|expert| (logit(expert), expert)).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            all.truncate(self.top_k);
            let sum: f32 = all.iter().map(|(logit, _)| logit.exp()).sum();
            ids.extend(all.iter().map(|(_, expert)| *expert as i32));
            weights.extend(all.iter().map(|(logit, _)| logit.exp() / sum));
        }
        Inputs { x: inputs(TOKENS, rank, self.tokens * self.hidden), ids, weights }
    }

    /// Returns the expected results for a rank's tokens, with errors by roundings: an expert's
    /// elements between its matrices, its result, the sum of a rank's experts and the final result
    /// are rounded to bf16, and a product's terms to f32.
    fn expected(self, inputs: &Inputs) -> Vec<Expected> {
        let Self { hidden, inner, experts, top_k, .. } = self;
        let half_step = f64::from(bf16::EPSILON) / 2.0;
        let f32_steps = (hidden + inner + top_k) as f64 * f64::from(f32::EPSILON);
        let wide = |elements: &[bf16]| elements.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let x = wide(&inputs.x);
        let token = |x: &f64| Expected { value: *x, error: 0.0 };
        let mut expected: Vec<Expected> = x.iter().map(token).collect();
        for expert in 0..experts {
            let up = wide(&self.matrix(UP, expert, hidden));
            let down = wide(&self.matrix(DOWN, expert, inner));
            let chosen = inputs.ids.iter().zip(&inputs.weights).enumerate();
            for (at, (_, weight)) in chosen.filter(|(_, (id, _))| **id as usize == expert) {
                let row = at / top_k * hidden..(at / top_k + 1) * hidden;
                let x: Vec<_> = x[row.clone()].iter().map(token).collect();
                // SiLU enlarges an error at most 1.1 times, its largest slope.
                let between = product(&up, &x, f32_steps).map(|Expected { value, error }| {
                    let silu = value / (1.0 + (-value).exp());
                    let error = 1.1 * error + f32_steps * value.abs();
                    Expected { value: silu, error: error + half_step * (silu.abs() + error) }
                });
                let between: Vec<_> = between.collect();
                let (results, weight) = (product(&down, &between, f32_steps), f64::from(*weight));
                for (sum, Expected { value, error }) in expected[row].iter_mut().zip(results) {
                    sum.value += weight * value;
                    // Two roundings: of the result, and of the sum of a rank's experts.
                    sum.error += weight * (error + 2.0 * half_step * (value.abs() + error));
                }
            }
        }
        let rounded = |Expected { value, error }| Expected {
            value,
            // 1.01 is for the products of errors.
            error: 1.01 * (error + half_step * (f64::abs(value) + error)) + f64::from(f32::EPSILON),
        };
        expected.into_iter().map(rounded).collect()
    }
}

/// Returns the product of a matrix and a vector.
fn product(matrix: &[f64], x: &[Expected], f32_steps: f64) -> impl Iterator<Item = Expected> {
    matrix.chunks(x.len()).map(move |row| {
        let (mut value, mut error, mut size) = (0.0, 0.0, 0.0);
        for (w, x) in row.iter().zip(x) {
            value += w * x.value;
            error += w.abs() * x.error;
            size += (w * x.value).abs();
        }
        Expected { value, error: error + f32_steps * size }
    })
}
