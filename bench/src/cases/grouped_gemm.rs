//! Products of groups of rows, each with a B of its own, on one GPU: `devcomm::GroupedGemm` against
//! a product of cuBLASLt for each group, and against one product with the same number of rows.

use std::cell::{Cell, RefCell};

use clap::ValueEnum;
use devcomm::{
    Buffer, DeviceSlice, Element, Gemm, GroupedGemm as Kernel, RowGroups, SymmetricBuffer,
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::numbers::Number;
use devcomm_testing::simulated::read;
use half::bf16;

use super::prelude::*;
use super::product::Library;
use crate::contenders::cublas::GroupedProduct;
use crate::contenders::cublaslt::{Extras, Plan, Types};

/// The elements of a large product that are checked.
const SAMPLES: usize = 4096;

/// The flags of `grouped-gemm`.
#[derive(Args, Clone, Debug)]
pub struct GroupedGemm {
    /// Rows of all groups, comma-separated [default: 1024,4096,16384; 5,130 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    rows: Vec<usize>,

    /// Number of groups [default: 32; 6 when simulated]
    #[arg(long, value_name = "N")]
    groups: Option<usize>,

    /// Rows of each B, which are columns of C [default: 2048; 72 when simulated]
    #[arg(long, value_name = "COLUMNS")]
    n: Option<usize>,

    /// Columns of A and B, the terms of the sums, a multiple of 8 [default: 7168; 40 when
    /// simulated]
    #[arg(long, value_name = "TERMS")]
    k: Option<usize>,

    /// The groups of rows
    #[arg(long, value_enum, default_value = "random")]
    split: Split,
}

/// How rows are divided among groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Split {
    /// All groups have the same number of rows, up to one
    Even,
    /// Each row belongs to a random group
    Random,
    /// The first groups have much more than others
    Skewed,
    /// One group has all rows
    One,
}

impl Split {
    /// Returns the rows of each group.
    fn sizes(self, rows: usize, groups: usize, seed: u64) -> Vec<usize> {
        let (mut sizes, mut random) = (vec![0; groups], fastrand::Rng::with_seed(seed));
        for row in 0..rows {
            let at = random.f64();
            sizes[match self {
                Self::Even => row % groups,
                Self::Random => (at * groups as f64) as usize,
                Self::Skewed => (at.powi(4) * groups as f64) as usize,
                Self::One => groups / 2,
            }] += 1;
        }
        sizes
    }
}

impl Benchmark for GroupedGemm {
    const NAME: &'static str = "grouped-gemm";

    fn validate(&self) -> Result<()> {
        ensure!(!self.rows.contains(&0), "--rows: there is at least one row");
        ensure!(self.groups != Some(0), "--groups: there is at least one");
        let [n, k] = [self.n.unwrap_or(8), self.k.unwrap_or(8)];
        Problem::combinations([&[1], &[n], &[k]], 1, 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() == 1, "grouped-gemm runs on one GPU: -g 1");
        let types = Types::new(bf16::DATA_TYPE, bf16::DATA_TYPE);
        let groups = self.groups.unwrap_or(harness.choose(32, 6));
        let [n, k] = [
            self.n.unwrap_or(harness.choose(2048, 72)),
            self.k.unwrap_or(harness.choose(7168, 40)),
        ];
        let theirs = [Variant::CublasLt, Variant::CublasGrouped];
        if !(n | k).is_multiple_of(256 / size_of::<bf16>()) {
            let why = "its algorithms are for groups that begin at multiples of 256 bytes: n and k \
                       that are multiples of 128";
            theirs.into_iter().try_for_each(|variant| job.selection.omit(variant, why))?;
        }
        let library = Library::load(job, types, &theirs)?;
        let kernel = Kernel::new(&harness.stream)?;
        // SAFETY: `Weights` waits for its copies to B, which end before any launch.
        let gemm = unsafe { Gemm::new(&harness.stream)?.with_constant_b() };
        job.begin()?;
        let factor = Weights::new(harness, Problem { m: 1, n, k, seed: harness.run.seed }, groups)?;
        let default: &[usize] = harness.choose(&[1024, 4096, 16384], &[5, 130]);
        for &m in if self.rows.is_empty() { default } else { &self.rows } {
            let problem = Problem { m, n, k, seed: harness.run.seed };
            let sizes = self.split.sizes(m, groups, harness.run.seed);
            let matrices = Matrices::new(harness, problem, &factor, sizes)?;
            let plans =
                job.selection.make(Variant::CublasLt, || matrices.plans(&library, types))?;
            if matches!(plans, Some(None)) {
                println!("# left out: cublaslt of {m} rows: it has no algorithm for a group");
            }
            let plans = plans.flatten();
            let mut contenders = Vec::new();
            for variant in [Variant::Rust, Variant::CublasLt, Variant::RustGemm] {
                if variant == Variant::CublasLt && plans.is_none() {
                    continue;
                }
                let plans = plans.as_deref().unwrap_or_default();
                contenders.extend(
                    job.selection
                        .make(variant, || matrices.contender(variant, (&kernel, &gemm), plans))?,
                );
            }
            contenders.extend(
                job.selection.make(Variant::CublasGrouped, || matrices.by_one_call())?.flatten(),
            );
            let case = Case::product("bf16", size_of::<bf16>(), [m, n, k], None);
            matrices.fill_for_checks()?;
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

/// The B of all groups: the B of group `g` has the rows of the first B, rotated by `g % n`.
struct Weights<'a> {
    harness: &'a Harness<'a>,
    problem: Problem,
    groups: usize,
    b: SymmetricBuffer<bf16>,
    /// Whether B now has random elements, for timing, and not those of the problem.
    is_noise: RefCell<Option<bool>>,
}

impl<'a> Weights<'a> {
    fn new(harness: &'a Harness<'a>, problem: Problem, groups: usize) -> Result<Self> {
        let b = harness.comm.mem_alloc(groups * problem.n * problem.k)?;
        Ok(Self { harness, problem, groups, b, is_noise: RefCell::new(None) })
    }

    fn fill(&self, is_noise: bool) -> Result<()> {
        if self.is_noise.replace(Some(is_noise)) == Some(is_noise) {
            return Ok(());
        }
        let Problem { n, k, .. } = self.problem;
        let first = match is_noise {
            true => self.problem.noise(Factor::B, 0),
            false => self.problem.factor(Factor::B, 0),
        };
        for group in 0..self.groups {
            let mut rows = first.clone();
            rows.rotate_left(group % n * k);
            self.b.slice(group * n * k..(group + 1) * n * k)?.copy_from_host(&rows)?;
        }
        self.harness.finish()
    }
}

/// A, B and the groups of a case.
struct Matrices<'a> {
    harness: &'a Harness<'a>,
    problem: Problem,
    weights: &'a Weights<'a>,
    sizes: Vec<usize>,
    groups: RowGroups,
    a: SymmetricBuffer<bf16>,
}

impl<'a> Matrices<'a> {
    fn new(
        harness: &'a Harness<'a>,
        problem: Problem,
        weights: &'a Weights<'a>,
        sizes: Vec<usize>,
    ) -> Result<Self> {
        let words = |numbers: Vec<usize>| {
            let words: Vec<u32> = numbers.into_iter().map(|number| number as u32).collect();
            harness.filled(&words).map(|buffer| buffer.device_slice())
        };
        let groups = RowGroups { offsets: words(offsets(&sizes))?, sizes: words(sizes.clone())? };
        let a = harness.comm.mem_alloc(problem.m * problem.k)?;
        Ok(Self { harness, problem, weights, sizes, groups, a })
    }

    fn fill_for_checks(&self) -> Result<()> {
        self.a.copy_from_host(&self.problem.factor(Factor::A, 0))?;
        self.weights.fill(false)
    }

    fn fill_for_timing(&self) -> Result<()> {
        self.a.copy_from_host(&self.problem.noise(Factor::A, 0))?;
        self.weights.fill(true)
    }

    /// Returns cuBLASLt's plan of each group that has rows; `None` if it has none for one of them.
    fn plans<'b>(
        &self,
        library: &'b Library,
        types: Types,
    ) -> Result<Option<Vec<Option<Plan<'b>>>>> {
        let Problem { n, k, .. } = self.problem;
        let plan = |&size: &usize| match size {
            0 => Ok(Some(None)),
            size => Ok(library.plan([size, n, k], types, Extras::default())?.map(Some)),
        };
        let plans = self.sizes.iter().map(plan).collect::<Result<Vec<_>>>()?;
        Ok(plans.into_iter().collect())
    }

    /// Returns the address of each group's A, B and C; `None` for a group without rows.
    fn addresses(&self, c: &DeviceSlice<bf16>) -> devcomm::Result<Vec<Option<[u64; 3]>>> {
        let Problem { n, k, .. } = self.problem;
        let addresses = |(group, (size, first)): (usize, (&usize, usize))| {
            let a = self.a.slice(first * k..)?.device_address();
            let b = self.weights.b.slice(group * n * k..)?.device_address();
            let c = c.slice(first * n..)?.device_address();
            Ok((*size > 0).then_some([a, b, c]))
        };
        self.sizes.iter().zip(offsets(&self.sizes)).enumerate().map(addresses).collect()
    }

    /// Returns the product by one call of cuBLAS; `None` if that is not installed, or refuses a
    /// plain launch of it.
    fn by_one_call(&self) -> Result<Option<Contender<'_>>> {
        let (Problem { n, k, .. }, harness) = (self.problem, self.harness);
        let c = harness.comm.mem_alloc::<bf16>(self.problem.m * n)?.device_slice();
        let groups = self.sizes.iter().copied().zip(self.addresses(&c)?);
        let groups: Vec<_> =
            groups.filter_map(|(rows, addresses)| Some((rows, addresses?))).collect();
        let Some(product) = GroupedProduct::new(harness.comm, &groups, [n, k])? else {
            println!("# left out: cublas-grouped: cuBLAS (libcublas.so) cannot be loaded");
            return Ok(None);
        };
        let outcome = Product { matrices: self, c, grouped: true };
        // SAFETY: the graphs of a comparison end before its contenders, which own or borrow the
        // buffers; these are as large as the groups' shapes need.
        let work = move || unsafe { product.enqueue(&harness.stream) };
        // Not every GPU and version of cuBLAS has this operation.
        if let Err(why) = work().and_then(|()| harness.stream.synchronize()) {
            println!("# left out: cublas-grouped: {why}");
            return Ok(None);
        }
        Ok(Some(Contender::new(Variant::CublasGrouped, work, outcome)))
    }

    fn contender<'b>(
        &'b self,
        variant: Variant,
        (kernel, gemm): (&'b Kernel, &'b Gemm),
        plans: &'b [Option<Plan<'b>>],
    ) -> Result<Contender<'b>> {
        let (shape @ [m, n, k], stream) = (self.problem.shape(), &self.harness.stream);
        let c = self.harness.comm.mem_alloc::<bf16>(m * n)?.device_slice();
        let (a, b, addresses) = (&self.a, &self.weights.b, self.addresses(&c)?);
        // A group without rows has neither a plan nor addresses.
        let products =
            || plans.iter().zip(&addresses).filter_map(|(p, at)| Some((p.as_ref()?, (*at)?)));
        if variant == Variant::CublasLt {
            // Algorithms are chosen by their times, which depend on the data, and on whether B is
            // in the L2 cache: calls take turns with the groups' B, as in the timed sequence.
            self.fill_for_timing()?;
            let all: Vec<u64> = addresses.iter().flatten().map(|[_, b, _]| *b).collect();
            let turn = Cell::new(0);
            for (plan, [a, _, c]) in products() {
                let enqueue = || {
                    let b = all[turn.replace(turn.get() + 1) % all.len()];
                    // SAFETY: the buffers are as large as the groups need, each B as any other, and
                    // live until the stream is idle. Only this stream uses the library's workspace.
                    unsafe { plan.enqueue([a, b, c], stream) }
                };
                plan.choose(
                    || self.harness.try_out(&enqueue),
                    || self.harness.time_briefly(&enqueue),
                    |times| Ok(times.to_vec()),
                )?;
            }
        }
        let outcome =
            Product { matrices: self, c: c.clone(), grouped: variant != Variant::RustGemm };
        let products: Vec<_> = products().collect();
        let mut algorithm =
            format!("{} groups, up to {} rows", self.sizes.len(), most(&self.sizes));
        if variant == Variant::Rust {
            algorithm = format!("{}, {algorithm}", kernel.plan(self.sizes.len(), shape)?);
        }
        // SAFETY: the graphs of a comparison end before its contenders, which own or borrow these
        // buffers; these are as large as the groups' shapes need. Only this stream uses the
        // library's workspace.
        let work = move || unsafe {
            match variant {
                Variant::Rust => kernel.launch(a, b, &c, &self.groups, shape, None),
                Variant::RustGemm => gemm.launch(a, &b.slice(..n * k)?, &c, shape),
                _ => products.iter().try_for_each(|(plan, at)| plan.enqueue(*at, stream)),
            }
        };
        Ok(Contender::new(variant, work, outcome).by_algorithm(algorithm))
    }
}

/// Returns the first row of each group.
fn offsets(sizes: &[usize]) -> Vec<usize> {
    let first = |end: &mut usize, size: &usize| Some(std::mem::replace(end, *end + size));
    sizes.iter().scan(0, first).collect()
}

fn most(sizes: &[usize]) -> usize {
    sizes.iter().copied().max().unwrap_or(0)
}

/// The product C.
struct Product<'a> {
    matrices: &'a Matrices<'a>,
    c: DeviceSlice<bf16>,
    /// Whether each group has its own B.
    grouped: bool,
}

impl Outcome for Product<'_> {
    fn poison(&self) -> Result<()> {
        // Every element is a NaN.
        Ok(self.c.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Matrices { harness, problem, sizes, .. } = self.matrices;
        let c = read(&self.c)?;
        let groups: Vec<usize> =
            sizes.iter().enumerate().flat_map(|(g, size)| std::iter::repeat_n(g, *size)).collect();
        let is_wrong = |(row, column): &(usize, usize)| {
            let group = if self.grouped { groups[*row] } else { 0 };
            let row_of_b = (column + group) % problem.n;
            let right = bf16::nearest(problem.exact(0..1, *row, row_of_b) as f32);
            c[row * problem.n + column] != right
        };
        Ok(match harness.rank.is_simulated() {
            true => problem.all().filter(is_wrong).count(),
            false => problem.samples(SAMPLES).filter(is_wrong).count(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_a_group() {
        for split in Split::value_variants() {
            let sizes = split.sizes(100, 7, 3);
            assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (7, 100), "{split:?}");
        }
        assert_eq!(Split::Even.sizes(9, 4, 0), [3, 2, 2, 2]);
        assert_eq!(offsets(&[3, 0, 2]), [0, 3, 3]);
    }
}
