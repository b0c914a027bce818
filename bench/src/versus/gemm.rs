//! Matrix product on one GPU, `C = A x B^T` in bf16: `kernels/src/gemm` against cuBLASLt.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{Buffer, Gemm as Kernel};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::Benchmark;
use super::job::Job;
use super::product::{Matrices, Product, Sum, load_cublaslt, tune};
use super::row::{Case, L2};
use super::selection::VariantInfo;
use super::shapes::ShapeOptions;
use crate::contender::{Contender, Variant};
use crate::cublaslt::Output;
use crate::gpu;
use crate::harness::Harness;

/// The flags of `gemm`.
#[derive(Args, Clone, Debug)]
pub struct Gemm {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,
}

impl Benchmark for Gemm {
    const NAME: &'static str = "gemm";
    const VARIANTS: &'static [VariantInfo] = &[
        (
            Variant::Rust,
            "a kernel in Rust, launched by devcomm::Gemm, told that no kernel writes B",
        ),
        (Variant::CublasLt, "cuBLASLt, the fastest of the first algorithms of its heuristics"),
    ];

    fn validate(&self) -> Result<()> {
        self.shapes.problems([&[8]; 3], 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() == 1, "gemm runs on one GPU: -g 1");
        let library = load_cublaslt(job, &[Variant::CublasLt])?;
        let problems = self.problems(harness)?;
        job.begin()?;
        let ours = job.selection.has(Variant::Rust).then(|| Kernel::new(&harness.stream));
        // SAFETY: what writes B has ended before any launch.
        let ours = ours.transpose()?.map(|gemm| unsafe { gemm.with_constant_b() });
        let (mut ran, mut kept) = (0, None);
        for (problem, copies) in problems {
            let shape @ [m, n, k] = problem.shape();
            let matrices = Matrices::new(harness, problem, copies, &mut kept)?;
            let plan = |output| match &library {
                Some(library) => library.plan(shape, output),
                None => Ok(None),
            };
            let (exact, theirs) = (plan(Output::F32)?, plan(Output::Bf16)?);
            let sum = match &exact {
                Some(exact) if harness.run.check > 0 => Some(Sum::new(&matrices, exact)?),
                _ => None,
            };
            let (a, stream) = (&matrices.a, &harness.stream);
            let mut contenders = Vec::new();
            let sum = sum.as_ref();
            let result = |c| Product { matrices: &matrices, c, sum, rounded_once: true };
            if let Some(gemm) = &ours {
                let (b, c) = (matrices.b_in_turn(), harness.comm.mem_alloc::<bf16>(m * n)?);
                let algorithm = gemm.plan(shape)?.to_string();
                println!("# rust {m}x{n}x{k}: {algorithm}");
                let checked = result(c.device_slice());
                // SAFETY: the graphs of a comparison end before its contenders, which own or
                // borrow these buffers.
                let work = move || unsafe { gemm.launch_capturable(a, b(), &c, shape) };
                let contender = Contender::new(Variant::Rust, work, checked);
                contenders.push(contender.by_algorithm(algorithm));
            }
            match theirs.as_ref().filter(|_| job.selection.has(Variant::CublasLt)) {
                Some(plan) => {
                    let (b, c) = (matrices.b_in_turn(), harness.comm.mem_alloc::<bf16>(m * n)?);
                    tune(&matrices, plan, c.device_address())?;
                    let checked = result(c.device_slice());
                    // SAFETY: as above; the buffers have the elements of the plan's shape.
                    let work = move || unsafe {
                        let (a, b) = (a.device_address(), b().device_address());
                        plan.enqueue([a, b, c.device_address()], stream)
                    };
                    let contender = Contender::new(Variant::CublasLt, work, checked);
                    contenders.push(contender.by_algorithm(plan.describe()));
                }
                None if job.selection.has(Variant::CublasLt) => {
                    println!("# left out: cublaslt of {m}x{n}x{k}: it has no algorithm");
                }
                None => {}
            }
            ran += contenders.len();
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: 1.0,
                shape: Some(shape),
                l2: Some(self.l2),
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        ensure!(ran > 0, "no variant can run these shapes");
        Ok(())
    }
}

impl Gemm {
    /// What the L2 cache holds when a product begins.
    pub(super) fn l2(&self) -> L2 {
        self.l2
    }

    /// The problems, each with the number of copies of B that its calls use in turn.
    pub(super) fn problems(&self, harness: &Harness<'_>) -> Result<Vec<(Problem, usize)>> {
        let defaults: [&[usize]; 3] = harness
            .choose([&[4096, 8192], &[4096, 8192], &[1024, 4096]], [&[1, 130], &[8, 264], &[72]]);
        let problems = self.shapes.problems(defaults, harness.run.seed)?;
        let with_copies = |problem| Ok((problem, self.copies(harness, &problem)?));
        problems.into_iter().map(with_copies).collect()
    }

    fn copies(&self, harness: &Harness<'_>, problem: &Problem) -> Result<usize> {
        /// How many times the copies fill the L2 cache.
        const CACHES: usize = 4;
        let copies = match (self.l2, harness.rank.is_simulated()) {
            (L2::Warm, _) => 1,
            (L2::Cold, true) => 2,
            (L2::Cold, false) => {
                let bytes = problem.n * problem.k * size_of::<bf16>();
                CACHES * gpu::l2_bytes(harness.rank.context())? / bytes + 1
            }
        };
        let run = harness.run;
        ensure!(
            run.graph == 0 || run.iters >= copies,
            "--l2 cold: {:?} needs {copies} copies of B, one per launch of a graph: raise -n",
            problem.shape()
        );
        Ok(copies)
    }
}
