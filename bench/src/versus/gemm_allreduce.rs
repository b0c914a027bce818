//! Matrix product followed by all-reduce, `C = sum over the ranks of A x B^T` in bf16: one kernel,
//! `kernels/src/gemm_allreduce`, against cuBLASLt's product and then `ncclAllReduce`.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{Buffer, DeviceSlice, GemmAllReduce as Gemm, ReduceOp, SymmetricBuffer, Window};
use devcomm_testing::gemm::{Factor, Problem};
use half::bf16;

use super::Benchmark;
use super::all_reduce::bus;
use super::job::Job;
use super::row::Case;
use super::selection::VariantInfo;
use crate::contender::{Contender, Outcome, Variant};
use crate::cublaslt::{CublasLt, Output, Plan};
use crate::harness::Harness;
use crate::ranks;

/// The flags of `gemm-allreduce`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmAllReduce {
    /// Rows of A and C, comma-separated [default: 512,4096; 1,130 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C [default: 4096; 7,264 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Columns of each rank's A and B (the terms of its sums), multiples of 8 [default: 1024,4096;
    /// 72 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,
}

/// The number of elements of a large product that the host computes and compares; all would take
/// too long.
const SAMPLES: usize = 256;

impl Benchmark for GemmAllReduce {
    const NAME: &'static str = "gemm-allreduce";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "one kernel, launched by devcomm::GemmAllReduce, C in a symmetric window"),
        (Variant::Nccl, "cuBLASLt, then ncclAllReduce in place, on memory that is not registered"),
        (Variant::NcclSym, "cuBLASLt, then ncclAllReduce in place, on a symmetric window"),
    ];

    fn validate(&self) -> Result<()> {
        self.problems([&[8]; 3], 1, 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        harness.comm.require_single_lsa_team()?;
        let library = load_cublaslt(job)?;
        job.begin()?;
        let defaults: [&[usize]; 3] =
            harness.choose([&[512, 4096], &[4096], &[1024, 4096]], [&[1, 130], &[7, 264], &[72]]);
        let ranks = harness.rank.n_ranks();
        for problem in self.problems(defaults, ranks, harness.run.seed)? {
            let shape @ [m, n, _] = problem.shape();
            let matrices = Matrices::new(harness, problem)?;
            let plan = |output| match &library {
                Some(library) => library.plan(shape, output),
                None => Ok(None),
            };
            // `exact` is for checks, `product` for NCCL's variants, which are omitted if cuBLASLt
            // has no algorithm for the shape.
            let (exact, product) = (plan(Output::F32)?, plan(Output::Bf16)?);
            if library.is_some() && product.is_none() && harness.rank.is_root() {
                println!("# left out: nccl, nccl-sym of {shape:?}: cuBLASLt has no algorithm");
            }
            let sum = match &exact {
                Some(exact) if harness.run.check > 0 => Some(Sum::new(&matrices, exact)?),
                _ => None,
            };
            let sum = sum.as_ref();
            let c = harness.comm.window::<bf16>(m * n)?;
            let mut contenders = Vec::new();
            if job.selection.has(Variant::Rust) {
                let gemm = Gemm::new(harness.comm, &harness.stream, m, n)?;
                contenders.push(fused(&matrices, gemm, &c, sum));
            }
            if let Some(plan) = &product {
                if job.selection.has(Variant::Nccl) {
                    let c = harness.comm.mem_alloc(c.len())?.device_slice();
                    contenders.push(unfused(Variant::Nccl, &matrices, plan, c, sum));
                }
                if job.selection.has(Variant::NcclSym) {
                    let c = c.device_slice();
                    contenders.push(unfused(Variant::NcclSym, &matrices, plan, c, sum));
                }
            }
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: bus(ranks),
                shape: Some(shape),
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

impl GemmAllReduce {
    /// Every combination of `m`, `n` and `k`, with defaults for empty lists.
    fn problems(&self, default: [&[usize]; 3], ranks: usize, seed: u64) -> Result<Vec<Problem>> {
        let [m, n, k] = default;
        let lists = [(&self.m, m), (&self.n, n), (&self.k, k)]
            .map(|(given, default)| if given.is_empty() { default } else { given });
        Problem::combinations(lists, ranks, seed)
    }
}

/// Loads cuBLASLt; without it NCCL's variants are omitted.
fn load_cublaslt(job: &mut Job<'_>) -> Result<Option<CublasLt>> {
    let (library, why) = match job.harness.rank.is_simulated() {
        true => (None, "cuBLASLt does not run on simulated GPUs"),
        false => (
            CublasLt::load(job.harness.comm)?,
            "cuBLASLt (libcublasLt.so) cannot be loaded: name its folder in LD_LIBRARY_PATH; \
             without it only samples of rust's results are checked",
        ),
    };
    if library.is_none() {
        job.selection.omit(Variant::Nccl, why)?;
        job.selection.omit(Variant::NcclSym, why)?;
    }
    Ok(library)
}

/// This rank's A and B.
struct Matrices<'a> {
    harness: &'a Harness<'a>,
    problem: Problem,
    a: SymmetricBuffer<bf16>,
    b: SymmetricBuffer<bf16>,
}

impl<'a> Matrices<'a> {
    fn new(harness: &'a Harness<'a>, problem: Problem) -> Result<Self> {
        let factor = |factor| -> Result<SymmetricBuffer<bf16>> {
            let elements = problem.factor(factor, harness.rank.rank());
            let buffer = harness.comm.mem_alloc(elements.len())?;
            buffer.copy_from_host(&elements)?;
            Ok(buffer)
        };
        Ok(Self { harness, problem, a: factor(Factor::A)?, b: factor(Factor::B)? })
    }

    /// Fills A and B with random bits: with the few distinct values of the checked inputs a GPU
    /// draws less power, and is faster.
    fn fill_for_timing(&self) -> Result<()> {
        let rank = self.harness.rank.rank();
        self.a.copy_from_host(&self.problem.noise(Factor::A, rank))?;
        Ok(self.b.copy_from_host(&self.problem.noise(Factor::B, rank))?)
    }
}

/// C before rounding: cuBLASLt and NCCL sum in f32, which is exact for these elements.
struct Sum {
    elements: Vec<f32>,
    /// The largest magnitude in any rank's product.
    largest: f64,
}

impl Sum {
    /// Computes C, and compares a few elements with the host's. *Collective*.
    fn new(matrices: &Matrices<'_>, plan: &Plan<'_>) -> Result<Self> {
        let Matrices { harness, problem, a, b } = matrices;
        let sum: SymmetricBuffer<f32> = harness.comm.mem_alloc(problem.m * problem.n)?;
        let mut elements = vec![0.0; sum.len()];
        // SAFETY: the buffers have the elements of the plan's shape, and only this stream uses
        // them.
        unsafe { plan.enqueue(a, b, sum.device_address(), &harness.stream)? };
        harness.finish()?;
        sum.copy_to_host(&mut elements)?;
        let largest = elements.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let largest = ranks::slowest(harness.rank, &[largest.into()])?;
        harness.comm.all_reduce(&sum, &sum, ReduceOp::Sum, &harness.stream)?;
        harness.finish()?;
        sum.copy_to_host(&mut elements)?;
        let ranks = 0..harness.rank.n_ranks();
        for (row, column) in problem.samples(SAMPLES) {
            let (got, right) =
                (elements[row * problem.n + column], problem.exact(ranks.clone(), row, column));
            ensure!(
                f64::from(got) == right,
                "the reference of cuBLASLt and ncclAllReduce is wrong: {got} at ({row}, \
                 {column}), expected {right}"
            );
        }
        Ok(Self { elements, largest: largest.first().copied().unwrap_or(f64::INFINITY) })
    }
}

/// C on this rank.
struct Product<'a> {
    matrices: &'a Matrices<'a>,
    c: DeviceSlice<bf16>,
    sum: Option<&'a Sum>,
    /// Whether C is rounded once, from an exact sum.
    rounded_once: bool,
}

impl Outcome for Product<'_> {
    fn poison(&self) -> Result<()> {
        // Every element is a NaN.
        Ok(self.c.fill_bytes(0xff)?)
    }

    /// Counts wrong elements: of all elements, or without `sum` on GPUs only of the samples.
    fn count_wrong(&self) -> Result<usize> {
        let Matrices { harness: Harness { rank, .. }, problem, .. } = self.matrices;
        let mut c = vec![bf16::ZERO; self.c.len()];
        self.c.copy_to_host(&mut c)?;
        let (n_ranks, ranks) = (rank.n_ranks(), 0..rank.n_ranks());
        Ok(match self.sum {
            None if rank.is_simulated() => problem.count_wrong(ranks, &c, problem.all()),
            None => problem.count_wrong(ranks, &c, problem.samples(SAMPLES)),
            Some(sum) => {
                let is_wrong = |&(&right, &got): &(&f32, &bf16)| match self.rounded_once {
                    true => got != bf16::from_f32(right),
                    false => is_beyond_rounding(right, got, sum.largest, n_ranks),
                };
                sum.elements.iter().zip(&c).filter(is_wrong).count()
            }
        })
    }
}

/// One kernel.
fn fused<'a>(
    matrices: &'a Matrices<'a>,
    gemm: Gemm,
    c: &'a Window<bf16>,
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let Matrices { problem, a, b, .. } = matrices;
    // SAFETY: the graphs of a comparison end before its contenders, which own or borrow these
    // buffers, and are launched on one stream.
    let work = move || unsafe { gemm.launch_capturable(a, b, c, problem.shape()) };
    let product = Product { matrices, c: c.device_slice(), sum, rounded_once: true };
    Contender::new(Variant::Rust, work, product)
}

/// cuBLASLt, and then NCCL.
fn unfused<'a>(
    variant: Variant,
    matrices: &'a Matrices<'a>,
    plan: &'a Plan<'a>,
    c: DeviceSlice<bf16>,
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let Matrices { harness: Harness { comm, stream, .. }, a, b, .. } = matrices;
    let product = Product { matrices, c: c.clone(), sum, rounded_once: false };
    let work = move || {
        // SAFETY: the buffers have the elements of the plan's shape, and only this stream uses
        // them.
        unsafe { plan.enqueue(a, b, c.device_address(), stream)? };
        comm.all_reduce(&c, &c, ReduceOp::Sum, stream)
    };
    Contender::new(variant, work, product)
}

/// Whether `got` differs from `right` by more than bf16 roundings allow: one of each product (a
/// rank's, of magnitude `largest` at most), and one of each partial sum.
fn is_beyond_rounding(right: f32, got: bf16, largest: f64, ranks: usize) -> bool {
    /// Half the distance from 1 to the next bf16 number.
    const HALF_STEP: f64 = 1.0 / 256.0;
    let roundings_of_products = ranks as f64 * largest;
    let roundings_of_sums: f64 = (2..=ranks).map(|terms| terms as f64 * largest).sum();
    // Partial sums of rounded products may exceed the exact ones slightly.
    let bound = HALF_STEP
        * (roundings_of_products + roundings_of_sums)
        * (1.0 + HALF_STEP).powi(ranks as i32);
    let error = (f64::from(got.to_f32()) - f64::from(right)).abs();
    error.is_nan() || error > bound
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_are_no_error_and_a_rank_that_is_missing_is() {
        // Two ranks with products of 100.25 each: bf16 has steps of 0.5 there, and of 1 at the sum.
        assert!(!is_beyond_rounding(200.5, bf16::from_f32(200.0), 100.25, 2));
        assert!(!is_beyond_rounding(200.5, bf16::from_f32(201.0), 100.25, 2));
        assert!(is_beyond_rounding(200.5, bf16::from_f32(100.0), 100.25, 2));
        assert!(is_beyond_rounding(200.5, bf16::NAN, 100.25, 2));
    }
}
