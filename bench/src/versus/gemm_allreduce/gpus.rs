//! On GPUs.

use anyhow::Result;
use devcomm::{
    Buffer, DeviceSlice, GemmAllReduce as Gemm, GemmOutput, KERNELS, ReduceOp, SymmetricBuffer,
};
use half::bf16;

use super::{GemmAllReduce, case};
use crate::cublaslt::{CublasLt, Output, Plan};
use crate::header::Header;
use crate::problem::{Factor, Problem};
use crate::ranks;
use crate::versus::gpus::Gpus;
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::variant::Variant;

/// Elements of a product that are compared with what the host computes, which takes too long for all.
const SAMPLES: usize = 256;

/// Measures every shape.
pub fn run(options: &GemmAllReduce, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
    let gpus = job.machine;
    gpus.comm.require_single_lsa_team()?;
    let library = CublasLt::load(gpus.comm)?;
    if library.is_none() {
        let why = "cuBLASLt (libcublasLt.so) cannot be loaded: name its folder in LD_LIBRARY_PATH; without it no more than \
                   samples of rust's results are checked";
        job.choice.leave_out(Variant::Nccl, why)?;
        job.choice.leave_out(Variant::NcclSym, why)?;
    }
    let compiled = match job.choice.has(Variant::Rust) {
        true => Some(gpus.rank.load(&KERNELS)?),
        false => None,
    };
    job.begin(Header::of(gpus.rank)?);
    let defaults: [&[usize]; 3] = [&[512, 4096], &[4096], &[1024, 4096]];
    let ranks = gpus.rank.n_ranks();
    for problem in options.problems(defaults, ranks, job.run.seed)? {
        let matrices = Matrices::new(gpus, problem)?;
        let plan = |output| match &library {
            Some(library) => library.plan(problem.shape(), output),
            None => Ok(None),
        };
        // To check with, and for NCCL's variants, which are not there for a shape that cuBLASLt has no algorithm for.
        let (exact, product) = (plan(Output::F32)?, plan(Output::Bf16)?);
        if library.is_some() && product.is_none() && gpus.rank.is_root() {
            println!(
                "# left out: nccl, nccl-sym of {:?}: cuBLASLt has no algorithm",
                problem.shape()
            );
        }
        let sum = match &exact {
            Some(exact) if job.run.check > 0 => Some(Sum::new(&matrices, exact)?),
            _ => None,
        };
        let sum = sum.as_ref();
        let c = GemmOutput::new(gpus.rank, gpus.comm, problem.m * problem.n)?;
        let mut ways: Ways<'_> = Vec::new();
        if let Some(compiled) = &compiled {
            let gemm =
                Gemm::new(gpus.rank, gpus.comm, compiled, &gpus.stream, problem.m, problem.n)?;
            ways.push(Box::new(Fused { matrices: &matrices, gemm, c: &c, sum }));
        }
        if let Some(plan) = &product {
            if job.choice.has(Variant::Nccl) {
                let c = gpus.comm.mem_alloc(c.len())?.device_slice();
                let variant = Variant::Nccl;
                ways.push(Box::new(Unfused { matrices: &matrices, variant, plan, c, sum }));
            }
            if job.choice.has(Variant::NcclSym) {
                let (c, variant) = (c.device_slice(), Variant::NcclSym);
                ways.push(Box::new(Unfused { matrices: &matrices, variant, plan, c, sum }));
            }
        }
        job.compare_refilled(case(problem, ranks), &ways, || matrices.fill_for_timing())?;
    }
    Ok(())
}

impl Problem {
    fn shape(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }
}

/// This rank's factors.
struct Matrices<'a> {
    gpus: &'a Gpus<'a>,
    problem: Problem,
    a: SymmetricBuffer<bf16>,
    b: SymmetricBuffer<bf16>,
}

impl<'a> Matrices<'a> {
    fn new(gpus: &'a Gpus<'a>, problem: Problem) -> Result<Self> {
        let factor = |factor| -> Result<SymmetricBuffer<bf16>> {
            let elements = problem.factor(factor, gpus.rank.rank());
            let buffer = gpus.comm.mem_alloc(elements.len())?;
            buffer.copy_from_host(&elements)?;
            Ok(buffer)
        };
        Ok(Self { gpus, problem, a: factor(Factor::A)?, b: factor(Factor::B)? })
    }

    /// Elements of which every bit is random: with the few values of those that are checked a GPU draws less power, and is faster.
    fn fill_for_timing(&self) -> Result<()> {
        let rank = self.gpus.rank.rank();
        self.a.copy_from_host(&self.problem.noise(Factor::A, rank))?;
        Ok(self.b.copy_from_host(&self.problem.noise(Factor::B, rank))?)
    }

    /// Elements of `got` that are wrong by a few that the host computes, or by `is_wrong` of all.
    fn count_wrong(
        &self,
        got: &DeviceSlice<bf16>,
        sum: Option<&Sum>,
        is_wrong: impl Fn(&Sum, f32, bf16) -> bool,
    ) -> Result<usize> {
        let mut c = vec![bf16::ZERO; got.len()];
        got.copy_to_host(&mut c)?;
        match sum {
            Some(sum) => {
                let pairs = sum.elements.iter().zip(&c);
                Ok(pairs.filter(|(right, got)| is_wrong(sum, **right, **got)).count())
            }
            None => {
                let ranks = 0..self.gpus.rank.n_ranks();
                Ok(self.problem.count_wrong(ranks, &c, self.problem.samples(SAMPLES)))
            }
        }
    }
}

/// What C is before it is rounded: cuBLASLt's and NCCL's sum in f32, which is exact for these elements.
struct Sum {
    elements: Vec<f32>,
    /// The largest magnitude in any rank's product.
    largest: f64,
}

impl Sum {
    /// Computes it, and compares a few elements with the host's. *Collective*.
    fn new(matrices: &Matrices<'_>, plan: &Plan<'_>) -> Result<Self> {
        let Matrices { gpus, problem, a, b } = matrices;
        let sum: SymmetricBuffer<f32> = gpus.comm.mem_alloc(problem.m * problem.n)?;
        let mut elements = vec![0.0; sum.len()];
        // SAFETY: the buffers have the elements of the plan's shape, and are used by this stream alone.
        unsafe { plan.enqueue(a, b, sum.device_address(), &gpus.stream)? };
        gpus.finish()?;
        sum.copy_to_host(&mut elements)?;
        let largest = elements.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let largest = ranks::slowest(gpus.rank, &[largest.into()])?;
        gpus.comm.all_reduce(&sum, &sum, ReduceOp::Sum, &gpus.stream)?;
        gpus.finish()?;
        sum.copy_to_host(&mut elements)?;
        let ranks = 0..gpus.rank.n_ranks();
        for (row, column) in problem.samples(SAMPLES) {
            let (got, right) =
                (elements[row * problem.n + column], problem.exact(ranks.clone(), row, column));
            anyhow::ensure!(
                f64::from(got) == right,
                "the reference of cuBLASLt and ncclAllReduce is wrong: {got} at ({row}, {column}), which is {right}"
            );
        }
        Ok(Self { elements, largest: largest.first().copied().unwrap_or(f64::INFINITY) })
    }
}

struct Fused<'a> {
    matrices: &'a Matrices<'a>,
    gemm: Gemm<'a>,
    c: &'a GemmOutput,
    sum: Option<&'a Sum>,
}

impl Way for Fused<'_> {
    fn variant(&self) -> Variant {
        Variant::Rust
    }

    fn enqueue(&self) -> Result<()> {
        let Matrices { problem, a, b, .. } = self.matrices;
        // SAFETY: the graphs of a comparison end before its ways do, which have all of this, and are launched to the one stream.
        unsafe { self.gemm.launch_capturable(a, b, self.c, problem.shape())? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        // NaNs.
        Ok(self.c.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // Rounded once, from an exact sum.
        let is_wrong = |_: &Sum, right, got| got != bf16::from_f32(right);
        self.matrices.count_wrong(&self.c.device_slice(), self.sum, is_wrong)
    }
}

struct Unfused<'a> {
    matrices: &'a Matrices<'a>,
    variant: Variant,
    plan: &'a Plan<'a>,
    c: DeviceSlice<bf16>,
    sum: Option<&'a Sum>,
}

impl Way for Unfused<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn enqueue(&self) -> Result<()> {
        let Matrices { gpus, a, b, .. } = self.matrices;
        // SAFETY: the buffers have the elements of the plan's shape, and are used by this stream alone.
        unsafe { self.plan.enqueue(a, b, self.c.device_address(), &gpus.stream)? };
        Ok(gpus.comm.all_reduce(&self.c, &self.c, ReduceOp::Sum, &gpus.stream)?)
    }

    fn spoil(&self) -> Result<()> {
        Ok(self.c.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let ranks = self.matrices.gpus.rank.n_ranks();
        let is_wrong = |sum: &Sum, right, got| is_beyond_rounding(right, got, sum.largest, ranks);
        self.matrices.count_wrong(&self.c, self.sum, is_wrong)
    }
}

/// Whether `got` differs from `right` by more than roundings to bf16 explain: of each rank's product, none of which is above `largest`, and
/// of each partial sum of theirs.
fn is_beyond_rounding(right: f32, got: bf16, largest: f64, ranks: usize) -> bool {
    /// Half the distance from 1 to the next number.
    const HALF_STEP: f64 = 1.0 / 256.0;
    let roundings_of_products = ranks as f64 * largest;
    let roundings_of_sums: f64 = (2..=ranks).map(|terms| terms as f64 * largest).sum();
    // Partial sums of rounded products are a little larger than of exact ones.
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
