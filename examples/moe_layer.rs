//! A layer of a mixture of experts, whose experts are distributed over the ranks.
//!
//! ```text
//! cargo xtask run moe_layer                      # every GPU, or four simulated ones
//! cargo xtask run moe_layer --tokens 1 --top-k 2 # one token of each rank
//! DEVCOMM_SIMULATE=8 cargo xtask run moe_layer   # eight simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./moe_layer
//! ```
//!
//! Each rank has tokens of its own, and as many experts as any other: matrices of `hidden x hidden`
//! elements. A router chooses the experts of each token, here by random logits. Then
//! `devcomm::ExpertParallel` sends each token's row to the ranks of its experts and puts the rows
//! there in the order of the experts, a product for each expert follows, and the results return: a
//! token becomes itself plus the weighted sum of its experts' results.
//!
//! The products are launched one by one, as the host reads how many rows each expert has; a grouped
//! product, which reads that on the GPU, will replace the loop. Every element is compared with a
//! reference computed in f64.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use devcomm::{Buffer, DeviceSlice, ExpertParallelOptions, Gemm, Rank, Tokens, World};
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
    /// Experts of each rank
    #[arg(long, default_value_t = 4)]
    experts: usize,
    /// Experts of each token
    #[arg(long, default_value_t = 4)]
    top_k: usize,
}

/// Sizes of a layer.
#[derive(Clone, Copy)]
struct Layer {
    tokens: usize,
    hidden: usize,
    /// Experts of all ranks.
    experts: usize,
    top_k: usize,
}

/// Seeds of the tokens, the router's logits, and the experts' matrices.
const TOKENS: u64 = 1;
const LOGITS: u64 = 2;
const MATRICES: u64 = 3;

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        let (tokens, hidden) = if rank.is_simulated() { (5, 64) } else { (256, 1024) };
        let layer = Layer {
            tokens: options.tokens.unwrap_or(tokens),
            hidden: options.hidden.unwrap_or(hidden),
            experts: options.experts * rank.n_ranks(),
            top_k: options.top_k,
        };
        let (all, top_k) = (layer.experts, layer.top_k);
        ensure!(top_k <= all, "--top-k {top_k}: a token has each of the {all} experts once");
        layer.run(rank)
    })
}

impl Layer {
    fn run(self, rank: &Rank) -> Result<()> {
        let Self { tokens, hidden, experts, top_k } = self;
        let (comm, me, local) = (rank.communicator()?, rank.rank(), experts / rank.n_ranks());
        let stream = rank.stream()?;
        let sizes = ExpertParallelOptions::new(hidden, tokens, experts, top_k);
        // Simulated blocks take time, also without work.
        let sizes = if rank.is_simulated() { sizes.blocks(3).threads(96) } else { sizes };
        let parallel = sizes.build(comm)?;
        let gemm = Gemm::new(&stream)?;

        // This rank's experts. An expert's matrix is as `nn.Linear` keeps it.
        let matrices = comm.mem_alloc::<bf16>(local * hidden * hidden)?;
        let host: Vec<_> = (me * local..(me + 1) * local).flat_map(|e| self.matrix(e)).collect();
        matrices.copy_from_host(&host)?;

        let x = comm.mem_alloc::<bf16>(tokens * hidden)?;
        x.copy_from_host(&inputs(TOKENS, me, tokens * hidden))?;
        let (ids, weights) = self.route(me);
        let device_ids = comm.mem_alloc::<i32>(ids.len())?;
        let device_weights = comm.mem_alloc::<f32>(weights.len())?;
        device_ids.copy_from_host(&ids)?;
        device_weights.copy_from_host(&weights)?;

        // Room for the worst routing: all tokens to this rank.
        let rows = comm.mem_alloc::<bf16>(parallel.most_rows() * hidden)?;
        let results = comm.mem_alloc::<bf16>(parallel.most_rows() * hidden)?;
        let output = comm.mem_alloc::<bf16>(tokens * hidden)?;
        // An element that no rank writes stays NaN.
        output.fill_bytes(0xff)?;
        results.fill_bytes(0xff)?;

        let routed =
            Tokens { count: tokens, input: &x, ids: &device_ids, weights: &device_weights };
        parallel.dispatch(routed, &stream)?;
        parallel.group(&rows, &stream)?;
        let (offsets, sizes) = (read(&parallel.offsets())?, read(&parallel.sizes())?);
        for (expert, (first, size)) in offsets.into_iter().zip(&sizes).enumerate() {
            if *size > 0 {
                let of_expert = first * hidden..(first + size) * hidden;
                let matrix = matrices.slice(expert * hidden * hidden..)?;
                let (a, c) = (rows.slice(of_expert.clone())?, results.slice(of_expert)?);
                gemm.launch(&a, &matrix, &c, [*size, hidden, hidden])?;
            }
        }
        parallel.combine(&results, &output, Some(&x.device_slice()), &stream)?;

        let mut got = vec![bf16::NAN; tokens * hidden];
        stream.copy_to_host(&output, &mut got)?;
        parallel.check()?;
        let wrong = self.count_wrong(me, &ids, &weights, &got);
        ensure!(wrong == 0, "rank {me}: {wrong} elements are wrong");
        let received = rank.all_gather(&[sizes.iter().sum::<usize>()])?.concat();
        if rank.is_root() {
            println!("{tokens} tokens of {hidden} per rank, {top_k} of {experts} experts: 0 wrong");
            println!("rows of the ranks' experts: {received:?}");
        }
        rank.barrier()?;
        Ok(())
    }

    /// The matrix of an expert, small enough that a result is about as large as a token.
    fn matrix(self, expert: usize) -> Vec<bf16> {
        let scale = bf16::from_f64(1.0 / (self.hidden as f64).sqrt());
        let elements = inputs::<bf16>(MATRICES, expert, self.hidden * self.hidden);
        elements.into_iter().map(|element| element * scale).collect()
    }

    /// For each token of a rank the experts with the largest logits, and their weights: the softmax
    /// of these.
    fn route(self, rank: usize) -> (Vec<i32>, Vec<f32>) {
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
        (ids, weights)
    }

    /// How many elements of a rank's results are further from the reference than roundings allow:
    /// to bf16 those of each expert's result, of the sum of a rank's experts and of the end, to f32
    /// those of a product's terms.
    fn count_wrong(self, rank: usize, ids: &[i32], weights: &[f32], got: &[bf16]) -> usize {
        let Self { hidden, experts, top_k, .. } = self;
        let half_step = f64::from(bf16::EPSILON) / 2.0;
        let f32_steps = (hidden + top_k) as f64 * f64::from(f32::EPSILON);
        let x: Vec<f64> =
            inputs::<bf16>(TOKENS, rank, got.len()).into_iter().map(f64::from).collect();
        // Of each element the reference, and how far a result may be from it.
        let mut expected: Vec<(f64, f64)> = x.iter().map(|x| (*x, 0.0)).collect();
        for expert in 0..experts {
            let matrix: Vec<f64> = self.matrix(expert).into_iter().map(f64::from).collect();
            let chosen = ids.iter().zip(weights).enumerate();
            for (at, (_, weight)) in chosen.filter(|(_, (id, _))| **id as usize == expert) {
                let of_token = at / top_k * hidden..(at / top_k + 1) * hidden;
                let (x, weight) = (&x[of_token.clone()], f64::from(*weight));
                for (row, (sum, error)) in matrix.chunks(hidden).zip(&mut expected[of_token]) {
                    let terms = row.iter().zip(x).map(|(w, x)| w * x);
                    let (result, size) =
                        terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                    *sum += weight * result;
                    *error += weight * (2.0 * half_step * result.abs() + f32_steps * size);
                }
            }
        }
        let is_right = |(got, (want, error)): &(&bf16, &(f64, f64))| {
            let allowed = 1.01 * (error + half_step * want.abs()) + f64::from(f32::EPSILON);
            (f64::from(**got) - want).abs() <= allowed
        };
        // A NaN is wrong too.
        got.len() - got.iter().zip(&expected).filter(is_right).count()
    }
}

/// Numbers that a kernel has written, after it has ended.
fn read(numbers: &DeviceSlice<u32>) -> Result<Vec<usize>> {
    let mut host = vec![0; numbers.len()];
    numbers.copy_to_host(&mut host)?;
    Ok(host.into_iter().map(|number| number as usize).collect())
}
