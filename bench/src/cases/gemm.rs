//! Matrix product on one GPU, `C = A x B^T`: `kernels/src/gemm` against cuBLASLt.

use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use devcomm::kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide};
use devcomm::{
    Activation, Buffer, Element, F8E4M3, F8E5M2, Gemm as Kernel, GemmElement, GemmOutput, GemmPlan,
    SymmetricBuffer, Tiling,
};
use devcomm_testing::gemm::Problem;
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::prelude::*;
use super::product::{BF16_ROUNDING, Epilogue, Library, Matrices, Product, by_cublaslt};
use super::shapes::ShapeOptions;
use super::tune_table::Table;
use crate::contenders::cublaslt::{Extras, Types};

/// The flags for the inputs of a product.
#[derive(Args, Clone, Debug)]
pub struct Inputs {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// Element type of A and B. C has the same, and bf16 for 8-bit floats
    #[arg(short = 'd', long, alias = "datatype", value_enum, default_value = "bf16")]
    pub(super) dtype: Dtype,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    pub(super) l2: L2,
}

/// The flags of `gemm`.
#[derive(Args, Clone, Debug)]
pub struct Gemm {
    #[command(flatten)]
    inputs: Inputs,

    /// Scales of A and B, by which the sums of 8-bit floats are multiplied: powers of two, so that
    /// checks are exact [default: 1,1]
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    scales: Vec<f32>,

    /// What follows the product: `bias` of each column, that and `gelu`, or that and a `residual`
    #[arg(long, value_enum, default_value = "none", conflicts_with = "scales")]
    epilogue: Epilogue,

    /// Plans of devcomm::Gemm, comma-separated, instead of the one that it chooses, a row for each:
    /// `wide`, `portable`, `swapped:<rows>x<columns>:<splits>`, by tile and number of blocks that
    /// share a sum, or that with `:<across>x<down>`, the neighbouring tiles that share their loads
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<GemmPlan>,

    /// Take the plans of the shapes that are in this table, which `tune gemm` wrote, from there
    #[arg(long, value_name = "FILE", conflicts_with = "plans")]
    table: Option<PathBuf>,
}

/// Element types of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "half")]
    F16,
    #[value(alias = "f8e4m3")]
    E4m3,
    #[value(alias = "f8e5m2")]
    E5m2,
}

impl Dtype {
    /// Returns the bytes of an element.
    fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }
}

/// An element type of A and B.
trait Factor: GemmElement<Output: Number> + Number {
    /// Returns the product with these scales, if the type has scales.
    fn scaled<'g>(product: Scaled<'g, Self>, _: [&SymmetricBuffer<f32>; 2]) -> Scaled<'g, Self> {
        product
    }
}

type Scaled<'g, T> = devcomm::Product<'g, T, <T as GemmElement>::Output>;

impl Factor for bf16 {}
impl Factor for f16 {}

impl Factor for F8E4M3 {
    fn scaled<'g>(product: Scaled<'g, Self>, by: [&SymmetricBuffer<f32>; 2]) -> Scaled<'g, Self> {
        product.scales(by)
    }
}

impl Factor for F8E5M2 {
    fn scaled<'g>(product: Scaled<'g, Self>, by: [&SymmetricBuffer<f32>; 2]) -> Scaled<'g, Self> {
        product.scales(by)
    }
}

/// The variants of cuBLASLt.
const OF_CUBLASLT: [Variant; 2] = [Variant::CublasLt, Variant::CublasLtRoundedParts];

/// The relative error that is allowed where parts of a sum are rounded: that of 16 roundings of the
/// largest sum.
const PARTS_ROUNDING: f64 = 16.0 * BF16_ROUNDING;

impl Benchmark for Gemm {
    const NAME: &'static str = "gemm";

    fn validate(&self) -> Result<()> {
        self.inputs.validate()?;
        let dtype = self.inputs.dtype;
        if !self.scales.is_empty() {
            ensure!(dtype.size() == 1, "--scales: only 8-bit floats have scales (--dtype e4m3)");
            let is_exact = |x: &f32| (-32..=32).any(|exponent| *x == 2.0_f32.powi(exponent));
            ensure!(
                self.scales.len() == 2 && self.scales.iter().all(is_exact),
                "--scales {:?}: one of A and one of B, powers of two from 2^-32 to 2^32",
                self.scales
            );
        }
        ensure!(
            self.plans.is_empty() || dtype == Dtype::Bf16,
            "--plan: only products of bf16 have several plans"
        );
        Ok(())
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        match self.inputs.dtype {
            Dtype::Bf16 => self.run_with::<bf16>(job),
            Dtype::F16 => self.run_with::<f16>(job),
            Dtype::E4m3 => self.run_with::<F8E4M3>(job),
            Dtype::E5m2 => self.run_with::<F8E5M2>(job),
        }
    }
}

impl Gemm {
    fn run_with<T: Factor>(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() == 1, "gemm runs on one GPU: -g 1");
        let (factors, product) = (T::DATA_TYPE, <T::Output as Element>::DATA_TYPE);
        let rounded = Types::new(factors, product);
        let library = Library::load(job, rounded, &OF_CUBLASLT)?;
        let problems = self.inputs.problems(harness)?;
        let ours = match job.selection.has(Variant::Rust) {
            true => self.kernels(harness, &problems)?,
            false => Vec::new(),
        };
        let scales = [self.scale(0), self.scale(1)];
        let factor_of_c = scales[0] * scales[1];
        let [scale_a, scale_b] = [harness.filled(&scales[..1])?, harness.filled(&scales[1..])?];
        job.begin()?;
        let (mut ran, mut cached_b) = (0, None);
        for (problem, copies) in problems {
            let shape @ [m, n, k] = problem.shape();
            let matrices = Matrices::<T>::new(harness, problem, 0..1, copies, &mut cached_b)?;
            let operands = EpilogueOperands::<T::Output>::new(harness, self.epilogue, [m, n])?;
            let both_scales =
                (size_of::<T>() == 1).then(|| [scale_a.device_address(), scale_b.device_address()]);
            let extras = operands.extras(both_scales);
            let mut theirs = Vec::new();
            for variant in OF_CUBLASLT.into_iter().filter(|variant| job.selection.has(*variant)) {
                let rounds_parts = variant == Variant::CublasLtRoundedParts;
                match library.plan(shape, Types { rounds_parts, ..rounded }, extras)? {
                    Some(plan) => theirs.push((variant, plan)),
                    None => println!("# left out: {variant} of {m}x{n}x{k}: it has no algorithm"),
                }
            }
            let sum = library.sum(&matrices)?;
            // `by_cublaslt` chooses an algorithm by its time, which depends on the data.
            matrices.fill_for_timing()?;
            let a = &matrices.a;
            let mut contenders = Vec::new();
            let sum = sum.as_ref();
            let (scale, epilogue) = (factor_of_c, self.epilogue);
            let result = |c| Product { scale, epilogue, ..Product::new(&matrices, c, sum) };
            for (i, gemm) in ours.iter().enumerate() {
                let (b, c) = (matrices.b_in_turn(), harness.comm.mem_alloc(m * n)?);
                let product = operands.apply(T::scaled(gemm.product(shape), [&scale_a, &scale_b]));
                let algorithm = describe(product.plan()?);
                println!("# rust {m}x{n}x{k}: {algorithm}");
                let checked = result(c.device_slice());
                let work = move || product.launch(a, b(), &c);
                let contender = Contender::new(Variant::Rust, work, checked);
                let asked = self.plans.get(i).map(GemmPlan::to_string);
                contenders.push(Contender { asked, ..contender.by_algorithm(algorithm) });
            }
            for (variant, plan) in &theirs {
                let lost = (*variant == Variant::CublasLtRoundedParts).then_some(PARTS_ROUNDING);
                let result = |c| Product { product_rounding: lost, ..result(c) };
                contenders.push(by_cublaslt(*variant, &matrices, plan, result)?);
            }
            ran += contenders.len();
            let case = Case::product(T::NAME, size_of::<T::Output>(), shape, Some(self.inputs.l2));
            matrices.fill_for_checks()?;
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        ensure!(ran > 0, "no variant can run these shapes");
        Ok(())
    }

    /// Returns the scale of A (0) or of B (1).
    fn scale(&self, i: usize) -> f32 {
        self.scales.get(i).copied().unwrap_or(1.0)
    }

    /// Returns the products in Rust: one by its own plans or those of a table, or one for each of
    /// `--plan`.
    fn kernels(&self, harness: &Harness<'_>, problems: &[(Problem, usize)]) -> Result<Vec<Kernel>> {
        // SAFETY: `Matrices` waits for its copies to B, which end before any launch.
        let kernel = || Kernel::new(&harness.stream).map(|gemm| unsafe { gemm.with_constant_b() });
        if self.plans.is_empty() {
            let gemm = kernel()?;
            if let Some(path) = &self.table {
                ensure!(path.is_file(), "there is no table {}", path.display());
                let table = Table::read(path)?;
                for shape in problems.iter().map(|(problem, _)| problem.shape()) {
                    if let Some(plan) = table.plan(shape) {
                        gemm.set_plan(shape, plan)?;
                    }
                }
            }
            return Ok(vec![gemm]);
        }
        let planned = |plan: &GemmPlan| {
            let gemm = kernel()?;
            for (Problem { m, n, k, .. }, _) in problems {
                let plans = gemm.plans([*m, *n, *k])?;
                if !plans.contains(plan) {
                    let plans: Vec<_> = plans.iter().map(GemmPlan::to_string).collect();
                    bail!("--plan {plan}: for {m}x{n}x{k} there are only {}", plans.join(", "));
                }
                gemm.set_plan([*m, *n, *k], *plan)?;
            }
            Ok(gemm)
        };
        self.plans.iter().map(planned).collect()
    }
}

impl Inputs {
    /// Refuses invalid values.
    pub(super) fn validate(&self) -> Result<()> {
        self.shapes.problems([&[8]; 3], self.dtype.size(), 1, 0).map(drop)
    }

    /// Returns the problems, each with the number of copies of B that its calls use in turn.
    pub(super) fn problems(&self, harness: &Harness<'_>) -> Result<Vec<(Problem, usize)>> {
        let defaults: [&[usize]; 3] = harness
            .choose([&[4096, 8192], &[4096, 8192], &[1024, 4096]], [&[1, 130], &[8, 264], &[72]]);
        let problems = self.shapes.problems(defaults, self.dtype.size(), 1, harness.run.seed)?;
        let bytes = self.dtype.size();
        let with_copies = |problem| Ok((problem, self.l2.copies_of_b(harness, &problem, bytes)?));
        problems.into_iter().map(with_copies).collect()
    }
}

/// The operands of an epilogue.
struct EpilogueOperands<O: Element> {
    epilogue: Epilogue,
    bias: Option<SymmetricBuffer<O>>,
    residual: Option<SymmetricBuffer<O>>,
}

impl<O: Number> EpilogueOperands<O> {
    fn new(harness: &Harness<'_>, epilogue: Epilogue, [m, n]: [usize; 2]) -> Result<Self> {
        let filled = |len: usize, element: fn(usize) -> f32| {
            harness.filled(&(0..len).map(|i| O::nearest(element(i))).collect::<Vec<O>>())
        };
        let bias = (epilogue != Epilogue::None).then(|| filled(n, Epilogue::bias));
        let residual = (epilogue == Epilogue::Residual).then(|| filled(m * n, Epilogue::residual));
        Ok(Self { epilogue, bias: bias.transpose()?, residual: residual.transpose()? })
    }

    /// Returns the inputs for cuBLASLt, with these scales.
    fn extras(&self, scales: Option<[u64; 2]>) -> Extras {
        let address = |buffer: &SymmetricBuffer<O>| buffer.device_address();
        Extras {
            scales,
            bias: self.bias.as_ref().map(address),
            gelu: self.epilogue == Epilogue::Gelu,
            residual: self.residual.as_ref().map(address),
        }
    }

    /// Returns the product with the epilogue.
    fn apply<'g, T>(&self, mut product: devcomm::Product<'g, T, O>) -> devcomm::Product<'g, T, O>
    where
        T: GemmElement,
        O: GemmOutput<T>,
    {
        if let Some(bias) = &self.bias {
            product = product.bias(bias);
        }
        if self.epilogue == Epilogue::Gelu {
            product = product.activation(Activation::Gelu);
        }
        match &self.residual {
            Some(residual) => product.residual(residual),
            None => product,
        }
    }
}

/// Returns a plan and its tile, cluster and split-K, in the format of cuBLASLt's algorithms.
fn describe(plan: GemmPlan) -> String {
    let (rows, columns, blocks, split) = match plan {
        GemmPlan::Portable => (portable::TILE, portable::TILE, 1, None),
        GemmPlan::Wide => (wide::TILE_M, wide::TILE_N, wide::CLUSTER, None),
        GemmPlan::Swapped(tiling) | GemmPlan::Unswapped(tiling) => {
            let Tiling { rows, columns, cluster, slices } = tiling;
            let split = match (cluster.splits, slices) {
                (1, 1) => None,
                (1, slices) => Some(format!("{slices} summed in f32")),
                (splits, _) => Some(format!("{splits} of the last tiles")),
            };
            (rows, columns, cluster.blocks(), split)
        }
        _ => return plan.to_string(),
    };
    let split = split.unwrap_or_else(|| "1".to_owned());
    format!("{plan}, tile {rows}x{columns}, cluster {blocks}x1x1, split-K {split}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_described_like_an_algorithm_of_cublaslt() {
        let described = |plan: &str| describe(plan.parse().unwrap());
        assert_eq!(described("wide"), "wide, tile 128x256, cluster 2x1x1, split-K 1");
        assert_eq!(
            described("swapped:8x64:2"),
            "swapped:8x64:2, tile 8x64, cluster 2x1x1, split-K 2 of the last tiles"
        );
        assert_eq!(
            described("swapped:128x128:1:2x1"),
            "swapped:128x128:1:2x1, tile 128x128, cluster 2x1x1, split-K 1"
        );
    }
}
