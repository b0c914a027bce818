//! Matrix products in bf16 with a collective, as one operation of `devcomm`, against cuBLASLt and
//! NCCL: the comparison that all of them share.

use std::fmt::{self, Display};
use std::str::FromStr;

use devcomm::{
    Buffer, Collectives, Communicator, DataType, DeviceSlice, Explanation, Gemm, ReduceOp, Stream,
    Window,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::benchmark::Options;
use super::operation::{CollectiveLibrary, Operation, buffer, nccl_variants};
use super::prelude::*;
use super::product::{BF16_ROUNDING, Library, Matrices, Product, Sum, tune};
use super::shapes::ShapeOptions;
use crate::contenders::cublaslt::{Extras, Plan, Types};
use crate::contenders::{PeerOptions, PeerWork, Selection};

/// A plan that was asked for.
#[derive(Clone, Copy, Debug)]
pub enum Requested<P> {
    Plan(P),
    /// The fastest, by the operation's `measure`.
    Measured,
}

impl<P: FromStr<Err: Display>> FromStr for Requested<P> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "measured" => Ok(Self::Measured),
            _ => text.parse().map(Self::Plan).map_err(|error| format!("{error}, or measured")),
        }
    }
}

impl<P: Display> Display for Requested<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan(plan) => plan.fmt(f),
            Self::Measured => f.write_str("measured"),
        }
    }
}

impl<P: Copy + PartialEq> Requested<P> {
    /// Sets the plan by `measure`, or by `set`. Returns the reason that `set` gives if the shape is
    /// done by another plan.
    pub fn set(
        &self,
        measure: impl FnOnce() -> devcomm::Result<P>,
        set: impl FnOnce(P) -> devcomm::Result<Explanation<P>>,
    ) -> Result<Result<(), String>> {
        match *self {
            Self::Measured => measure().map(|_| Ok(())).map_err(Into::into),
            Self::Plan(plan) => {
                let how = set(plan)?;
                Ok(if how.plan == plan { Ok(()) } else { Err(how.reason.to_owned()) })
            }
        }
    }
}

/// The reason for a plan that this machine has kept since an earlier run.
const KEPT: &str = "as this machine measured";

/// Returns the plan by which an operation does a shape, with `form` after it, and whether it is a
/// kept one; or why it does not.
pub fn plan_of<P: Display>(how: devcomm::Result<Explanation<P>>, form: &str) -> String {
    match how {
        Err(error) => error.to_string(),
        Ok(Explanation { plan, reason: KEPT }) => format!("{plan}{form} ({KEPT})"),
        Ok(how) => format!("{}{form}", how.plan),
    }
}

/// The flags of a benchmark of such a product.
pub trait Fusion: Args + Sync {
    /// The name, as of [`Benchmark`].
    const NAME: &'static str;

    /// The collective: an all-reduce of the ranks' products, in place; a reduce-scatter of their
    /// rows; or an all-gather of the rows of A before the product, where all ranks have the same A
    /// and B.
    const COLLECTIVE: Operation;

    /// The operation of `devcomm`.
    type Operation;

    /// A plan on the command line.
    type Requested: Display + Clone;

    /// Returns the shapes, what the L2 cache holds, and the peers that run too.
    fn inputs(&self) -> (&ShapeOptions, L2, &PeerOptions);

    /// Returns the plans that were asked for instead of the default of a shape; none for that.
    fn asked(
        &self,
        on: (&Communicator, &Stream),
        shape: [usize; 3],
    ) -> Result<Vec<Self::Requested>>;

    /// Lists of `m`, `n` and `k` that replace empty ones: on GPUs, and simulated.
    fn defaults() -> [[&'static [usize]; 3]; 2];

    /// Refuses a problem that this number of ranks does not have.
    fn require(problem: &Problem, ranks: usize) -> Result<()>;

    /// Returns the operation for a shape; `asked` is the plan that it will have.
    fn new(
        comm: &Communicator,
        stream: &Stream,
        shape: [usize; 3],
        asked: Option<&Self::Requested>,
    ) -> Result<Self::Operation>;

    /// Sets the plan, or the one that is the fastest with these buffers. Returns the reason if that
    /// cannot do the shape.
    fn set(
        operation: &Self::Operation,
        asked: &Self::Requested,
        buffers: ([&DeviceSlice<bf16>; 2], &Window<bf16>),
        shape: [usize; 3],
    ) -> Result<Result<(), String>>;

    /// Returns the plan by which it does a shape, and [`Product::product_rounding`].
    fn plan(operation: &Self::Operation, shape: [usize; 3]) -> (String, Option<f64>);

    /// Enqueues a product; the first of `factors` has this rank's elements of A.
    fn launch(
        operation: &Self::Operation,
        factors: [&DeviceSlice<bf16>; 2],
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> devcomm::Result<()>;
}

impl<F: Fusion> Benchmark for F {
    const NAME: &'static str = F::NAME;

    fn validate(&self) -> Result<()> {
        problems(self, [&[8]; 3], 1, 0).map(drop)
    }

    fn peers(&self) -> Option<&PeerOptions> {
        Some(self.inputs().2)
    }

    fn work(&self, options: &Options, gpus: usize) -> Result<PeerWork> {
        let [on_gpus, simulated] = F::defaults();
        let default = if options.simulate.is_some() { simulated } else { on_gpus };
        let problems = problems(self, default, gpus, options.run.seed)?;
        let (collective, cold) = (F::COLLECTIVE.name(), self.inputs().1 == L2::Cold);
        Ok(PeerWork::Product {
            collective,
            shapes: problems.iter().map(Problem::shape).collect(),
            cold,
        })
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        compare(self, job)
    }
}

/// The variants of cuBLASLt's product and a collective.
const OF_CUBLASLT: [Variant; 3] = [Variant::CublasLtRust, Variant::Nccl, Variant::NcclSym];

/// Returns the problems, with defaults for empty lists.
fn problems<F: Fusion>(
    fusion: &F,
    default: [&[usize]; 3],
    ranks: usize,
    seed: u64,
) -> Result<Vec<Problem>> {
    let shapes = fusion.inputs().0;
    let mut problems = shapes.problems(default, size_of::<bf16>(), ranks, seed)?;
    let gathers = F::COLLECTIVE == Operation::AllGather;
    problems.retain(|problem| shapes.has_collective(problem, gathers));
    if shapes.are_random() && F::COLLECTIVE != Operation::AllReduce {
        // The ranks share the rows.
        problems.iter_mut().for_each(|problem| problem.m = problem.m.next_multiple_of(ranks));
    }
    problems.iter().try_for_each(|problem| F::require(problem, ranks))?;
    Ok(problems)
}

/// The libraries and kernels that do the parts of an operation; `nccl` is empty without cuBLASLt.
struct Means<'a> {
    collectives: Collectives,
    gemm: Gemm,
    nccl: Vec<Nccl<'a>>,
}

/// Compares the variants of a benchmark.
fn compare<F: Fusion>(fusion: &F, job: &mut Job<'_>) -> Result<()> {
    let harness = job.harness;
    harness.comm.require_single_lsa_team()?;
    let types = Types::new(DataType::Bfloat16, DataType::Bfloat16);
    let library = Library::load(job, types, &OF_CUBLASLT)?;
    let collectives = harness.collectives().build(harness.comm)?;
    // SAFETY: `Matrices` waits for its copies to B, which end before any launch.
    let gemm = unsafe { Gemm::new(&harness.stream)?.with_constant_b() };
    let nccl = if library.is_loaded() { job.nccl()? } else { Vec::new() };
    let means = Means { collectives, gemm, nccl };
    job.begin()?;
    let [on_gpus, simulated] = F::defaults();
    let (ranks, seed) = (harness.rank.n_ranks(), harness.run.seed);
    let (mut cached_b, l2) = (None, fusion.inputs().1);
    for problem in problems(fusion, harness.choose(on_gpus, simulated), ranks, seed)? {
        let copies = l2.copies_of_b(harness, &problem, size_of::<bf16>())?;
        let summed = if F::COLLECTIVE == Operation::AllGather { 1 } else { ranks };
        let matrices = &Matrices::new(harness, problem, 0..summed, copies, &mut cached_b)?;
        let theirs = library.plan(problem.shape(), types, Extras::default())?;
        if library.is_loaded() && theirs.is_none() {
            leave_out(matrices, &"cuBLASLt's variants", "it has no algorithm");
        }
        let sum = library.sum(matrices)?;
        // `tune` and measured plans choose by times, which depend on the data.
        matrices.fill_for_timing()?;
        let data = &Data::new::<F>(matrices, sum.as_ref(), &means.nccl)?;
        let c = &harness.comm.window::<bf16>(data.result_len())?;
        if let Some(plan) = &theirs {
            let scratch = harness.comm.mem_alloc::<bf16>(problem.m * problem.n)?;
            tune(Variant::CublasLt, matrices, plan, scratch.device_address())?;
        }
        let mut contenders = ours(fusion, &job.selection, &means, data, c)?;
        if let Some(plan) = &theirs {
            contenders.extend(by_cublaslt(&job.selection, &means, data, plan, c)?);
        }
        matrices.fill_for_checks()?;
        data.fill()?;
        job.compare_refilled(data.case(l2), &contenders, || {
            matrices.fill_for_timing()?;
            Ok(data.fill()?)
        })?;
    }
    Ok(())
}

fn leave_out(matrices: &Matrices<'_, bf16>, what: &dyn Display, why: &str) {
    if matrices.harness.rank.is_root() {
        println!("# left out: {what} of {:?}: {why}", matrices.problem.shape());
    }
}

/// Returns the operation of `devcomm` by each plan, its product alone, and its parts in sequence.
fn ours<'a, F: Fusion<Operation: 'a>>(
    fusion: &F,
    selection: &Selection,
    means: &'a Means<'a>,
    data: &'a Data<'a>,
    c: &'a Window<bf16>,
) -> Result<Vec<Contender<'a>>> {
    let (matrices, Harness { comm, stream, .. }) = (data.matrices, data.harness);
    let shape = matrices.problem.shape();
    let mut contenders = Vec::new();
    let asked = fusion.asked((comm, stream), shape)?;
    let asked: Vec<_> =
        if asked.is_empty() { vec![None] } else { asked.into_iter().map(Some).collect() };
    for asked in asked.into_iter().filter(|_| selection.has(Variant::Rust)) {
        let operation = F::new(comm, stream, shape, asked.as_ref())?;
        let (a, b) = (&data.own, matrices.b_in_turn());
        if let Some(asked) = &asked
            && let Err(why) = F::set(&operation, asked, ([a, b()], c), shape)?
        {
            leave_out(matrices, asked, &why);
            continue;
        }
        let (algorithm, product_rounding) = F::plan(&operation, shape);
        let work = move || F::launch(&operation, [a, b()], c, shape);
        let checked = data.result(c.device_slice(), product_rounding);
        let contender = Contender::new(Variant::Rust, work, checked);
        let asked = asked.map(|asked| asked.to_string());
        contenders.push(Contender { asked, ..contender.by_algorithm(algorithm) });
    }
    let multiply = || {
        let (b, product) = (matrices.b_in_turn(), means.gemm.product(shape));
        move |a: &DeviceSlice<bf16>, c: &DeviceSlice<bf16>| product.launch(a, b(), c)
    };
    if selection.has(Variant::RustGemm) {
        let (multiply, a, c) = (multiply(), matrices.a.device_slice(), c.device_slice());
        let checked = data.result(c.clone(), None);
        let work = move || multiply(&a, &c);
        contenders.push(Contender::new(Variant::RustGemm, work, checked));
    }
    if selection.has(Variant::RustUnfused) {
        let parts = (multiply(), CollectiveLibrary::Devcomm(&means.collectives));
        let on = (Variant::RustUnfused, data.harness.comm, &data.own);
        contenders.push(data.in_sequence(on, c.device_slice(), parts)?);
    }
    Ok(contenders)
}

/// Returns contenders of cuBLASLt's product followed by each collective.
fn by_cublaslt<'a>(
    selection: &Selection,
    means: &'a Means<'a>,
    data: &'a Data<'a>,
    plan: &'a Plan<'a>,
    c: &Window<bf16>,
) -> Result<Vec<Contender<'a>>> {
    let (matrices, Harness { comm, stream, .. }) = (data.matrices, data.harness);
    let mut contenders = Vec::new();
    let by_devcomm = (
        Variant::CublasLtRust,
        CollectiveLibrary::Devcomm(&means.collectives),
        *comm,
        None,
        &data.own,
    );
    let mut on = Vec::from_iter(selection.has(Variant::CublasLtRust).then_some(by_devcomm));
    for (variant, (i, nccl)) in nccl_variants(selection, &means.nccl, data.collective.reduces()) {
        let (comm, name) = (nccl.comm(), nccl.name.as_ref());
        on.push((variant, CollectiveLibrary::Nccl(comm), comm, name, &data.with_nccl[i]));
    }
    for (variant, by, comm, name, own) in on {
        let b = matrices.b_in_turn();
        let multiply = move |a: &DeviceSlice<bf16>, c: &DeviceSlice<bf16>| {
            let addresses = [a.device_address(), b().device_address(), c.device_address()];
            // SAFETY: the buffers are as large as the plan's shape needs, and only this stream uses
            // them and the library's workspace.
            unsafe { plan.enqueue(addresses, stream) }
        };
        let c = match variant {
            Variant::CublasLtRust => c.device_slice(),
            _ => buffer(comm, variant, c.len())?,
        };
        let contender = data.in_sequence((variant, comm, own), c, (multiply, by))?;
        contenders.push(contender.by_algorithm(plan.describe()).configured(name));
    }
    Ok(contenders)
}

/// A rank's inputs and outputs of a problem.
struct Data<'a> {
    collective: Operation,
    harness: &'a Harness<'a>,
    matrices: &'a Matrices<'a, bf16>,
    sum: Option<&'a Sum>,
    /// The rank's elements of A: a window if other ranks receive them.
    own: DeviceSlice<bf16>,
    /// The rank's elements of A in a window of each communicator of NCCL.
    with_nccl: Vec<DeviceSlice<bf16>>,
    /// The rank's elements of A, within the whole A.
    within: DeviceSlice<bf16>,
}

impl<'a> Data<'a> {
    fn new<F: Fusion>(
        matrices: &'a Matrices<'a, bf16>,
        sum: Option<&'a Sum>,
        nccl: &[Nccl<'_>],
    ) -> devcomm::Result<Self> {
        let (harness, collective) = (matrices.harness, F::COLLECTIVE);
        let all = matrices.a.device_slice();
        let (own, with_nccl, within) = match collective {
            Operation::AllGather => {
                let len = all.len() / harness.rank.n_ranks();
                let first = harness.rank.rank() * len;
                let within = all.slice(first..first + len)?;
                let window = |comm: &Communicator| Ok(comm.window(len)?.device_slice());
                let with_nccl = nccl.iter().map(|nccl| window(nccl.comm()));
                (window(harness.comm)?, with_nccl.collect::<devcomm::Result<_>>()?, within)
            }
            _ => (all.clone(), vec![all.clone(); nccl.len()], all),
        };
        let data = Self { collective, harness, matrices, sum, own, with_nccl, within };
        data.fill()?;
        Ok(data)
    }

    /// Returns the case that the rows belong to.
    fn case(&self, l2: L2) -> Case {
        let shape @ [m, _, k] = self.matrices.problem.shape();
        let case = Case::product("bf16", size_of::<bf16>(), shape, Some(l2));
        let case = match self.collective {
            Operation::AllGather => {
                Case { count: m * k, size: m * k * size_of::<bf16>(), redop: "-", ..case }
            }
            _ => case,
        };
        Case { bus: self.collective.bus(self.harness.rank.n_ranks()), ..case }
    }

    /// Copies the rank's elements of A to the windows from which an all-gather sends them.
    fn fill(&self) -> devcomm::Result<()> {
        if self.collective == Operation::AllGather {
            let mut all = self.with_nccl.iter().chain([&self.own]);
            all.try_for_each(|own| self.harness.stream.copy(&self.within, own))?;
            self.harness.stream.synchronize()?;
        }
        Ok(())
    }

    /// Returns the rows of C that the rank gets.
    fn rows(&self) -> std::ops::Range<usize> {
        let m = self.matrices.problem.m;
        match self.collective {
            Operation::ReduceScatter => {
                let part = m / self.harness.rank.n_ranks();
                let first = self.harness.rank.rank() * part;
                first..first + part
            }
            _ => 0..m,
        }
    }

    /// Returns the elements of C that the rank gets.
    fn result_len(&self) -> usize {
        self.rows().len() * self.matrices.problem.n
    }

    /// Returns the check of C.
    fn result(&self, c: DeviceSlice<bf16>, product_rounding: Option<f64>) -> Product<'a, bf16> {
        let product = Product::new(self.matrices, c, self.sum);
        Product { rows: self.rows(), product_rounding, ..product }
    }

    /// Returns a product and a collective: an all-gather before it, or a reduction after it.
    fn in_sequence(
        &self,
        (variant, comm, own): (Variant, &Communicator, &DeviceSlice<bf16>),
        c: DeviceSlice<bf16>,
        (multiply, by): (
            impl Fn(&DeviceSlice<bf16>, &DeviceSlice<bf16>) -> devcomm::Result<()> + 'a,
            CollectiveLibrary<'a>,
        ),
    ) -> Result<Contender<'a>> {
        let Problem { m, n, k, .. } = self.matrices.problem;
        let (collective, harness) = (self.collective, self.harness);
        let collect = move |from: &DeviceSlice<bf16>, to: &DeviceSlice<bf16>| {
            collective.enqueue(by, [from, to], ReduceOp::Sum, harness)
        };
        let lost = collective.reduces().then_some(BF16_ROUNDING);
        let checked = self.result(c.clone(), lost);
        if collective == Operation::AllGather {
            // `nccl` sends from memory that is not registered.
            let own = if variant == Variant::Nccl { &self.within } else { own };
            let (own, a) = (own.clone(), buffer(comm, variant, m * k)?);
            let work = move || collect(&own, &a).and_then(|()| multiply(&a, &c));
            return Ok(Contender::new(variant, work, checked));
        }
        let product = match collective {
            Operation::AllReduce => c.clone(),
            _ => buffer(comm, variant, m * n)?,
        };
        let a = self.own.clone();
        let work = move || multiply(&a, &product).and_then(|()| collect(&product, &c));
        Ok(Contender::new(variant, work, checked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_that_its_plan_was_kept_by_an_earlier_run() {
        let decisions = include_str!("../../../crates/ops/src/decisions.rs");
        assert!(decisions.contains(KEPT));
        let how = |reason| Ok(Explanation { plan: "strips", reason });
        assert_eq!(plan_of(how(KEPT), " in bf16"), "strips in bf16 (as this machine measured)");
        assert_eq!(plan_of(how("as it was set"), " in bf16"), "strips in bf16");
    }
}
