//! Common parts of the benchmarks of matrix products: the factors, cuBLASLt, and the check of C.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use clap::ValueEnum;
use devcomm::{Buffer, DeviceSlice, Element, ReduceOp, SymmetricBuffer};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::numbers::Number;
use devcomm_testing::simulated::read;

use super::prelude::*;
use crate::base::{gpu, ranks};
use crate::contenders::cublaslt::{CublasLt, Extras, Plan, Types};

/// The number of elements of a large product that the host computes and compares; all would take
/// too long.
const SAMPLES: usize = 256;

/// cuBLASLt, where it can be loaded.
pub struct Library(Option<CublasLt>);

impl Library {
    /// Loads it; without it the variants that use it are omitted.
    pub fn load(job: &mut Job<'_>, types: Types, users: &[Variant]) -> Result<Self> {
        let (library, why) = match (job.harness.rank.is_simulated(), types.why_not()) {
            (true, _) => (None, "cuBLASLt does not run on simulated GPUs"),
            (false, Some(why)) => (None, why),
            (false, None) => (
                CublasLt::load(job.harness.comm)?,
                "cuBLASLt (libcublasLt.so) cannot be loaded: name its folder in LD_LIBRARY_PATH; \
                 without it as the reference only samples of the other variants' results are \
                 checked",
            ),
        };
        if library.is_none() {
            users.iter().try_for_each(|variant| job.selection.omit(*variant, why))?;
        }
        Ok(Self(library))
    }

    pub fn is_loaded(&self) -> bool {
        self.0.is_some()
    }

    /// Does the same as [`CublasLt::plan`]; `None` without the library, too.
    pub fn plan(
        &self,
        shape: [usize; 3],
        types: Types,
        extras: Extras,
    ) -> Result<Option<Plan<'_>>> {
        self.0.as_ref().map_or(Ok(None), |library| library.plan(shape, types, extras))
    }

    /// Computes C for the checks, if there are any and the library can; A and B are filled for
    /// checks. *Collective*.
    pub fn sum<T: Number>(&self, matrices: &Matrices<'_, T>) -> Result<Option<Sum>> {
        let types = Types::new(T::DATA_TYPE, f32::DATA_TYPE);
        let plan = self.plan(matrices.problem.shape(), types, Extras::default())?;
        let plan = plan.filter(|_| matrices.harness.run.check > 0);
        plan.map(|plan| Sum::new(matrices, &plan)).transpose()
    }
}

/// Returns cuBLASLt's product as a contender, by the fastest of the plan's algorithms, with its own
/// C, which `result` checks. *Collective*.
pub fn by_cublaslt<'a, T: Number, O: Number>(
    variant: Variant,
    matrices: &'a Matrices<'_, T>,
    plan: &'a Plan<'_>,
    result: impl FnOnce(DeviceSlice<O>) -> Product<'a, O>,
) -> Result<Contender<'a>> {
    let Matrices { harness, problem: Problem { m, n, .. }, a, .. } = matrices;
    let (b, c) = (matrices.b_in_turn(), harness.comm.mem_alloc::<O>(m * n)?.device_slice());
    tune(variant, matrices, plan, c.device_address())?;
    let checked = result(c.clone());
    let work = move || {
        let addresses = [a.device_address(), b().device_address(), c.device_address()];
        // SAFETY: the graphs of a comparison end before its contenders, which borrow A and B and
        // own C; all are as large as the plan's shape needs, and only this stream uses them and the
        // library's workspace. The operands of the epilogue live as long as A.
        unsafe { plan.enqueue(addresses, &harness.stream) }
    };
    Ok(Contender::new(variant, work, checked).by_algorithm(plan.describe()))
}

/// Makes the plan use the fastest of its algorithms for C = A x B^T at address `c`, with the data
/// that A and B have now, and prints it as that of `variant`. *Collective*.
pub fn tune<T: Number>(
    variant: Variant,
    matrices: &Matrices<'_, T>,
    plan: &Plan<'_>,
    c: u64,
) -> Result<()> {
    let harness = matrices.harness;
    let b = matrices.b_in_turn();
    // SAFETY: the buffers are as large as the plan's shape needs, and only this stream uses them
    // and the library's workspace; graphs end before the buffers.
    let enqueue = || unsafe {
        plan.enqueue([matrices.a.device_address(), b().device_address(), c], &harness.stream)
    };
    plan.choose(
        || harness.try_out(&enqueue),
        || harness.time_briefly(&enqueue),
        |times| ranks::slowest(harness.rank, times),
    )?;
    if harness.rank.is_root() {
        let [m, n, k] = matrices.problem.shape();
        println!("# {variant} {m}x{n}x{k}: {}", plan.describe());
    }
    Ok(())
}

impl L2 {
    /// Returns the copies of B that the calls use in turn, of elements of this number of bytes.
    pub fn copies_of_b(
        self,
        harness: &Harness<'_>,
        problem: &Problem,
        element_bytes: usize,
    ) -> Result<usize> {
        /// How many times the copies fill the L2 cache.
        const CACHES: usize = 4;
        let bytes = problem.n * problem.k * element_bytes;
        // The copies that fill the L2 cache, and those that are in turn.
        let (fill, copies) = match (self, harness.rank.is_simulated()) {
            (Self::Warm, _) => return Ok(1),
            (Self::Cold, true) => (1, 2),
            (Self::Cold, false) => {
                let cache = gpu::l2_bytes(harness.rank.context())?;
                (cache / bytes + 1, CACHES * cache / bytes + 1)
            }
        };
        let run = harness.run;
        if run.graph == 0 {
            return Ok(copies);
        }
        cold_copies(copies, fill, run.iters).with_context(|| {
            let shape = problem.shape();
            let need = "one per launch of a graph: raise -n";
            format!("--l2 cold: {shape:?} needs {copies} copies of B, {need}")
        })
    }
}

/// Returns how many copies a graph of `calls` calls uses in turn, at least `copies`; `None` if it
/// has fewer calls. A graph that does not use all equally often begins, when it is launched again,
/// with those that it used last: at least `fill` of them.
fn cold_copies(copies: usize, fill: usize, calls: usize) -> Option<usize> {
    (copies..=calls).find(|copies| calls.is_multiple_of(*copies) || calls % copies >= fill)
}

/// This rank's A and B.
pub struct Matrices<'a, T: Element> {
    pub harness: &'a Harness<'a>,
    pub problem: Problem,
    /// The ranks whose products add up to C.
    ranks: Range<usize>,
    pub a: SymmetricBuffer<T>,
    b: Rc<Weights<T>>,
}

/// This rank's B, for all products with the same `n` and `k`.
pub struct Weights<T: Element> {
    shape: [usize; 2],
    copies: Vec<DeviceSlice<T>>,
    /// The elements for checks.
    exact: SymmetricBuffer<T>,
    /// The elements for timing.
    noise: SymmetricBuffer<T>,
}

impl<T: Number> Weights<T> {
    fn new(
        harness: &Harness<'_>,
        problem: Problem,
        rank: usize,
        copies: usize,
    ) -> Result<Rc<Self>> {
        let len = problem.n * problem.k;
        // A copy begins at a multiple of 256 bytes.
        let stride = len.next_multiple_of(256 / size_of::<T>());
        let all = harness.comm.mem_alloc(copies * stride)?;
        let copy = |i| all.slice(i * stride..i * stride + len);
        let copies = (0..copies).map(copy).collect::<devcomm::Result<_>>()?;
        let exact = harness.filled(&problem.factor(Factor::B, rank))?;
        let noise = harness.filled(&problem.noise(Factor::B, rank))?;
        Ok(Rc::new(Self { shape: [problem.n, problem.k], copies, exact, noise }))
    }
}

impl<'a, T: Number> Matrices<'a, T> {
    /// Returns A and B for a C that is the sum of the products of `ranks`; other ranks have the
    /// elements of the first of these. B is that of `cached_b`, from an earlier shape of the run,
    /// if its shape is the same; otherwise `copies` copies of a new B, which replaces it there.
    /// Both are filled for checks.
    pub fn new(
        harness: &'a Harness<'a>,
        problem: Problem,
        ranks: Range<usize>,
        copies: usize,
        cached_b: &mut Option<Rc<Weights<T>>>,
    ) -> Result<Self> {
        let rank = owner(harness, &ranks);
        // A B of another shape is freed before the new one is allocated.
        let b = match cached_b.take().filter(|b| b.shape == [problem.n, problem.k]) {
            Some(b) => b,
            None => Weights::new(harness, problem, rank, copies)?,
        };
        let a = harness.comm.mem_alloc(problem.m * problem.k)?;
        let matrices = Self { harness, problem, ranks, a, b: Rc::clone(cached_b.insert(b)) };
        matrices.fill_for_checks()?;
        Ok(matrices)
    }

    /// Fills A and B with numbers whose sums are exact.
    pub fn fill_for_checks(&self) -> Result<()> {
        let rank = owner(self.harness, &self.ranks);
        self.fill(&self.problem.factor(Factor::A, rank), &self.b.exact)
    }

    fn fill(&self, a: &[T], b: &SymmetricBuffer<T>) -> Result<()> {
        self.a.copy_from_host(a)?;
        self.b.copies.iter().try_for_each(|copy| self.harness.stream.copy(b, copy))?;
        self.harness.finish()
    }

    /// Returns B's copies in turn, one per call.
    pub fn b_in_turn<'b>(&'b self) -> impl Fn() -> &'b DeviceSlice<T> {
        let (next, copies) = (Cell::new(0), &self.b.copies);
        move || &copies[next.replace((next.get() + 1) % copies.len())]
    }

    /// Fills A and B with random bits: with the few distinct values of the checked inputs a GPU
    /// draws less power, and is faster.
    pub fn fill_for_timing(&self) -> Result<()> {
        let rank = owner(self.harness, &self.ranks);
        self.fill(&self.problem.noise(Factor::A, rank), &self.b.noise)
    }
}

/// Returns the rank whose elements this rank has, if C is the sum of the products of `ranks`.
fn owner(harness: &Harness<'_>, ranks: &Range<usize>) -> usize {
    let own = harness.rank.rank();
    if ranks.contains(&own) { own } else { ranks.start }
}

/// C before it is scaled and rounded: cuBLASLt and NCCL sum in f32, exactly for these elements.
pub struct Sum {
    elements: Vec<f32>,
    /// The largest magnitude in any rank's product.
    largest: f64,
}

impl Sum {
    /// Computes C from the elements for checks, with which A and B are filled, and compares a few
    /// elements with the host's. *Collective*.
    fn new<T: Number>(matrices: &Matrices<'_, T>, plan: &Plan<'_>) -> Result<Self> {
        let Matrices { harness, problem, ranks: summed, a, b } = matrices;
        let (a, b) = (a.device_address(), b.copies[0].device_address());
        let sum: SymmetricBuffer<f32> = harness.comm.mem_alloc(problem.m * problem.n)?;
        // SAFETY: the buffers are as large as the plan's shape needs, and only this stream uses
        // them and the library's workspace.
        unsafe { plan.enqueue([a, b, sum.device_address()], &harness.stream)? };
        harness.finish()?;
        let mut elements = read(&sum)?;
        let largest = elements.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let largest = ranks::slowest(harness.rank, &[largest.into()])?;
        if summed.len() > 1 {
            harness.comm.all_reduce(&sum, &sum, ReduceOp::Sum, &harness.stream)?;
            harness.finish()?;
            elements = read(&sum)?;
        }
        for (row, column) in problem.samples(SAMPLES) {
            let (got, right) =
                (elements[row * problem.n + column], problem.exact(summed.clone(), row, column));
            ensure!(
                f64::from(got) == right,
                "the reference of cuBLASLt and ncclAllReduce is wrong: {got} at ({row}, \
                 {column}), expected {right}"
            );
        }
        Ok(Self { elements, largest: largest[0] })
    }
}

/// The relative error of rounding to bf16: half the distance from 1 to the next number.
pub const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// C, or some of its rows, on this rank.
pub struct Product<'a, O> {
    pub harness: &'a Harness<'a>,
    pub problem: Problem,
    /// The ranks whose products add up to C.
    pub ranks: Range<usize>,
    pub c: DeviceSlice<O>,
    /// The rows that this rank has. If C is rounded once these are all rows, as the check without
    /// `sum` needs: ranks share the rows only of reduce-scatters, whose products are rounded.
    pub rows: Range<usize>,
    pub sum: Option<&'a Sum>,
    /// The relative error of each rank's product, if products are rounded before they are added.
    /// `None` if C is rounded once, from an exact sum.
    pub product_rounding: Option<f64>,
    /// The factor of the sums: a power of two, so that the multiplication is exact.
    pub scale: f32,
    pub epilogue: Epilogue,
}

/// The epilogue of a product on one GPU. All but `None` add a bias first. Biases and residuals are
/// small integers, so that the sums stay exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Epilogue {
    #[default]
    None,
    Bias,
    Gelu,
    /// Small integers for all elements
    Residual,
}

impl Epilogue {
    /// Returns the bias of a column.
    pub fn bias(column: usize) -> f32 {
        (column % 7) as f32 - 3.0
    }

    /// Returns the residual of an element of C.
    pub fn residual(element: usize) -> f32 {
        (element % 5) as f32 - 2.0
    }

    /// Returns the element of C for a sum, and the absolute error that the GPU's function may have.
    fn apply(self, sum: f32, element: usize, column: usize) -> (f32, f64) {
        let x = sum + Self::bias(column);
        // GELU by the hyperbolic tangent; the first factor is sqrt(2 / pi).
        let argument = 0.797_884_6 * (x + 0.044_715 * x * x * x);
        match self {
            Self::None => (sum, 0.0),
            Self::Bias => (x, 0.0),
            Self::Gelu => (x * (1.0 + argument.tanh()) / 2.0, 0.01),
            Self::Residual => (x + Self::residual(element), 0.0),
        }
    }
}

impl<'a, O> Product<'a, O> {
    /// Returns a product of the sums themselves, each rounded once.
    pub fn new<T: Number>(
        matrices: &Matrices<'a, T>,
        c: DeviceSlice<O>,
        sum: Option<&'a Sum>,
    ) -> Self {
        let Matrices { harness, problem, ref ranks, .. } = *matrices;
        let (ranks, rows) = (ranks.clone(), 0..problem.m);
        let (product_rounding, scale, epilogue) = (None, 1.0, Epilogue::None);
        Self { harness, problem, ranks, c, rows, sum, product_rounding, scale, epilogue }
    }
}

impl<O: Number> Outcome for Product<'_, O> {
    fn poison(&self) -> Result<()> {
        // Every element is a NaN.
        Ok(self.c.fill_bytes(0xff)?)
    }

    /// Counts wrong elements: of all elements, or without `sum` on GPUs only of the samples.
    fn count_wrong(&self) -> Result<usize> {
        let Self { harness: Harness { rank, .. }, problem, ranks, rows, .. } = self;
        let mut c = read(&self.c)?;
        // The scale is a power of two, so this gives the rounded sums themselves.
        if self.scale != 1.0 {
            let sum = |x: &O| O::nearest((x.value() / f64::from(self.scale)) as f32);
            c = c.iter().map(sum).collect();
        }
        let n_ranks = ranks.len();
        let to_check = || -> Box<dyn Iterator<Item = _>> {
            match rank.is_simulated() {
                true => Box::new(problem.all()),
                false => Box::new(problem.samples(SAMPLES)),
            }
        };
        let is_wrong = |sum: f32, got: O, largest: f64, element: usize| {
            let (right, max_error) = self.epilogue.apply(sum, element, element % problem.n);
            match self.product_rounding {
                None if max_error > 0.0 => {
                    let bound = max_error + O::EPSILON * f64::from(right.abs());
                    let error = (got.value() - f64::from(right)).abs();
                    error.is_nan() || error > bound
                }
                None => got != O::nearest(right),
                Some(each) => is_beyond_rounding(right, got, largest, n_ranks, each),
            }
        };
        let is_sample_wrong = |&(row, column): &(usize, usize)| {
            let product = |rank| problem.exact(rank..rank + 1, row, column).abs();
            let largest = ranks.clone().map(product).fold(0.0, f64::max);
            let right = problem.exact(ranks.clone(), row, column) as f32;
            let element = (row - rows.start) * problem.n + column;
            is_wrong(right, c[element], largest, element)
        };
        let is_here = |(row, _): &(usize, usize)| rows.contains(row);
        Ok(match self.sum {
            None if self.product_rounding.is_none() && self.epilogue == Epilogue::None => {
                problem.count_wrong(ranks.clone(), &c, to_check())
            }
            None => to_check().filter(is_here).filter(is_sample_wrong).count(),
            Some(sum) => {
                let is_wrong = |&(i, (&right, &got)): &(usize, (&f32, &O))| {
                    is_wrong(right, got, sum.largest, i)
                };
                let sums = &sum.elements[rows.start * problem.n..];
                sums.iter().zip(&c).enumerate().filter(is_wrong).count()
            }
        })
    }
}

/// Returns whether `got` differs from `right` by more than roundings allow: that of each rank's
/// product, which is at most `largest` and has the relative error `product_rounding`, and that of
/// each partial sum.
fn is_beyond_rounding<O: Number>(
    right: f32,
    got: O,
    largest: f64,
    ranks: usize,
    product_rounding: f64,
) -> bool {
    // The relative error of a rounding: half the distance from 1 to the next number.
    let half_step = O::EPSILON / 2.0;
    let roundings_of_products = product_rounding * ranks as f64 * largest;
    let roundings_of_sums: f64 = (2..=ranks).map(|terms| terms as f64 * largest).sum();
    // Partial sums of rounded products may exceed the exact ones slightly.
    let more = (1.0 + product_rounding.max(half_step)).powi(ranks as i32);
    let bound = (roundings_of_products + half_step * roundings_of_sums) * more;
    let error = (got.value() - f64::from(right)).abs();
    error.is_nan() || error > bound
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn a_graph_that_is_launched_again_finds_no_warm_copy() {
        // Two copies fill the cache: the last of 22 calls with 7 copies would use what the first
        // one uses.
        for (copies, fill, calls, expected) in [
            (7, 2, 22, Some(8)),
            (7, 2, 21, Some(7)),
            (7, 2, 23, Some(7)),
            (7, 7, 13, Some(13)),
            (2, 1, 5, Some(2)),
            (7, 2, 6, None),
        ] {
            assert_eq!(cold_copies(copies, fill, calls), expected, "{copies} {fill} {calls}");
        }
    }

    #[test]
    fn roundings_are_no_error_and_a_rank_that_is_missing_is() {
        // Two ranks with products of 100.25 each: bf16 has steps of 0.5 there, and of 1 at the sum.
        assert!(!is_beyond_rounding(200.5, bf16::from_f32(200.0), 100.25, 2, BF16_ROUNDING));
        assert!(!is_beyond_rounding(200.5, bf16::from_f32(201.0), 100.25, 2, BF16_ROUNDING));
        assert!(is_beyond_rounding(200.5, bf16::from_f32(100.0), 100.25, 2, BF16_ROUNDING));
        assert!(is_beyond_rounding(200.5, bf16::NAN, 100.25, 2, BF16_ROUNDING));
        // A product of 8-bit floats has an error of up to a sixteenth.
        assert!(is_beyond_rounding(200.5, bf16::from_f32(189.0), 100.25, 2, BF16_ROUNDING));
        assert!(!is_beyond_rounding(200.5, bf16::from_f32(189.0), 100.25, 2, 0.0625));
    }
}
