//! The matrix products of `docs/gemm.md` in bf16 on one GPU, from a loop to the shipped kernel,
//! against cuBLASLt.

use devcomm::{Buffer, Element};
use devcomm_gemm_ladder::{Ladder, Step, check_shape};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::prelude::*;
use super::product::{Library, Matrices, Product, by_cublaslt};
use super::shapes::lists_or;
use crate::contenders::cublaslt::{Extras, Types};

/// The flags of `gemm-ladder`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmLadder {
    /// Rows of A and C, comma-separated, multiples of 256 [default: 4096; 256 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C, multiples of 256 [default: 4096; 256 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Columns of A and B (the terms of the sums), multiples of 64 [default: 4096; 64 when
    /// simulated]
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,
}

/// The steps, and for each the most calls that are timed together: calls of the first steps take
/// long.
const STEPS: [(Variant, Step, usize); Step::ALL.len()] = [
    (Variant::Step1Loop, Step::Loop, 1),
    (Variant::Step2Shared, Step::Shared, 1),
    (Variant::Step3Registers, Step::Registers, 1),
    (Variant::Step4Mma, Step::Mma, usize::MAX),
    (Variant::Step5Wgmma, Step::Wgmma, usize::MAX),
    (Variant::Step6Pipeline, Step::Pipeline, usize::MAX),
    (Variant::Step7Cluster, Step::Cluster, usize::MAX),
    (Variant::Step8Persistent, Step::Persistent, usize::MAX),
    (Variant::Rust, Step::Shipped, usize::MAX),
];

impl Benchmark for GemmLadder {
    const NAME: &'static str = "gemm-ladder";

    fn validate(&self) -> Result<()> {
        self.problems([&[256], &[256], &[64]], 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() == 1, "gemm-ladder runs on one GPU: -g 1");
        let types = Types::new(bf16::DATA_TYPE, bf16::DATA_TYPE);
        let library = Library::load(job, types, &[Variant::CublasLt])?;
        job.begin()?;
        let ladder = Ladder::new(&harness.stream)?;
        let defaults: [&[usize]; 3] = harness.choose([&[4096]; 3], [&[256], &[256], &[64]]);
        let mut cached_b = None;
        for problem in self.problems(defaults, harness.run.seed)? {
            let shape @ [m, n, _] = problem.shape();
            let matrices = Matrices::new(harness, problem, 0..1, 1, &mut cached_b)?;
            let theirs = library.plan(shape, types, Extras::default())?;
            let sum = library.sum(&matrices)?;
            // `by_cublaslt` chooses an algorithm by its time, which depends on the data.
            matrices.fill_for_timing()?;
            let (sum, ladder) = (sum.as_ref(), &ladder);
            // There is one copy of B, so that every turn gives the same.
            let (a, b) = (matrices.a.device_slice(), matrices.b_in_turn()().clone());
            let mut contenders = Vec::new();
            for (variant, step, calls) in STEPS {
                if job.selection.has(variant) {
                    let c = harness.comm.mem_alloc::<bf16>(m * n)?.device_slice();
                    let (matrices, c, a, b) = (&matrices, c.clone(), a.clone(), b.clone());
                    let result = Product::new(matrices, c.clone(), sum);
                    // SAFETY: the graphs of a comparison end before its contenders, which own the
                    // matrices; only this stream uses them.
                    let work = move || unsafe { ladder.launch(step, [&a, &b, &c], shape) };
                    let contender = Contender::new(variant, work, result);
                    contenders.push(Contender { most_calls: calls, ..contender });
                }
            }
            if let Some(plan) = theirs.as_ref().filter(|_| job.selection.has(Variant::CublasLt)) {
                let result = |c| Product::<bf16>::new(&matrices, c, sum);
                contenders.push(by_cublaslt(Variant::CublasLt, &matrices, plan, result)?);
            }
            let case = Case::product("bf16", size_of::<bf16>(), shape, None);
            matrices.fill_for_checks()?;
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

impl GemmLadder {
    /// Returns the problems, of whole tiles.
    fn problems(&self, default: [&[usize]; 3], seed: u64) -> Result<Vec<Problem>> {
        let lists = lists_or([&self.m, &self.n, &self.k], default);
        let problems = Problem::combinations(lists, 1, seed)?;
        problems.iter().try_for_each(|problem| check_shape(problem.shape()).map(drop))?;
        Ok(problems)
    }
}
