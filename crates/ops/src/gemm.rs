//! The matrix product on one GPU, with the checks of its launches.

mod candidates;
mod element;
mod epilogue;
mod grouped;
mod launches;
mod matrices;
mod model;
mod plan;
mod plan_text;
mod product;
mod tile_kernel;

use devcomm_host::DeviceBuffer;
use parking_lot::Mutex;

pub(crate) use self::candidates::{Candidates, LIKELY, measured};
pub use self::element::{GemmElement, GemmOutput, HalfElement, ScaledElement};
pub use self::epilogue::Activation;
pub(crate) use self::epilogue::Added;
pub use self::grouped::{GroupedGemm, RowGroups};
use self::launches::Prepared;
pub(crate) use self::launches::{wide_grid, wide_pairs};
pub(crate) use self::matrices::{Matrices, map, swapped_maps, wide_maps};
pub(crate) use self::plan::clusters;
pub use self::plan::{GemmPlan, Tiling};
pub use self::product::Product;
pub(crate) use self::tile_kernel::{ResidentClusters, TileKernel, division_args};
use crate::decisions::Cache;
use crate::prelude::*;
use crate::timing;
use crate::tuned::Tuned;

/// `C = A x B^T` on one GPU and one stream: owns the loaded kernels, and launches them.
///
/// A has `m x k` elements, B `n x k` (as `nn.Linear` has its weights) and C `m x n`, all row-major.
/// Sums are in f32 and rounded once. A and B are of bf16, f16 or 8-bit floats, C is of
/// [`GemmElement::Output`]. [`product`](Self::product) adds a bias, an activation and more, and has
/// C in f32, and A and B stored transposed.
///
/// On Hopper, products whose rows of A and B begin at multiples of 16 bytes (`k` is a multiple of
/// 8 for bf16) are by `wgmma` and TMA, fastest if `n` is a multiple of 8 too. All others, and those
/// on any other GPU since Ampere, are by `mma.sync`: fastest if `k` is a multiple of 8, slowest if
/// it is odd.
///
/// 8-bit floats need Hopper, matrices at multiples of 16 bytes, and `k` that is a multiple of 16.
/// Hopper adds their products with about 13 bits after the binary point of the largest of them and
/// the sum so far. With [`block_scales`](Product::block_scales) this holds for each 128 terms.
///
/// How a shape of bf16 is computed, its [`GemmPlan`], comes from a table of measurements for this
/// GPU, or from a model; [`measure`](Self::measure) times several plans, and chooses the fastest.
/// A product of f16 has the plan of its shape in bf16. For products of 8-bit floats there is only
/// one plan.
///
/// Launches are *dependent*: a product may begin while the previous kernel of the stream runs, but
/// waits for it before it reads A or B, or writes C.
///
/// ```no_run
/// use devcomm::{Gemm, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = comm.mem_alloc::<bf16>(m * n)?;
///     Gemm::new(&stream)?.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct Gemm {
    compiled: Kernels,
    stream: Stream,
    /// The GPU's name if it is of the Hopper family.
    hopper: Option<String>,
    /// Whether a product may read B early: see [`with_constant_b`](Self::with_constant_b).
    pub(crate) constant_b: bool,
    /// The memory of plans with slices, on Hopper: of products whose terms several clusters of
    /// blocks divide among them.
    slices: Option<SliceMemory>,
    /// The order in which products use the memory of slices: one after the other.
    order: StreamOrder,
    plans: Mutex<Cache<Problem, Planned>>,
    tuned: Mutex<Tuned<GemmPlan>>,
}

/// The memory for the fields `sums` and `arrived` of [`Slices`](kernels::gemm::slices::Slices), for
/// as many blocks as are resident.
type SliceMemory = (DeviceBuffer<f32>, DeviceBuffer<u32>);
/// The types of the factors and of C, a shape, and whether A and B are transposed.
type Problem = ([DataType; 2], Extents, [bool; 2]);
/// A and B as they are by default.
const NOT_TRANSPOSED: [bool; 2] = [false; 2];

/// The plan for a shape, and its prepared launch if it is not the portable plan.
type Planned = (GemmPlan, Option<Prepared>);

const FILES: &[&str] = &[
    kernels::gemm_wgmma::<bf16>::FILE,
    kernels::gemm_swapped::<bf16, kernels::gemm::gemm_swapped::M8N64>::FILE,
    kernels::gemm_unswapped::<bf16, kernels::gemm::gemm_swapped::M96N64>::FILE,
    kernels::gemm_blocks::<F8E4M3>::FILE,
    kernels::gemm_mma::<bf16>::FILE,
];

impl Gemm {
    /// Prepares products launched on `stream`. On Hopper it allocates 15 MB for plans with slices,
    /// in which several blocks add a part of the terms of a tile each.
    ///
    /// # Errors
    ///
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) on a GPU before Ampere;
    /// those of loading kernels and of [`Context::alloc`](devcomm_host::Context::alloc).
    pub fn new(stream: &Stream) -> Result<Self> {
        let compiled = Kernels::load(stream.context(), &KERNELS.only(FILES))?;
        let is_hopper = compiled.info::<kernels::gemm_wgmma<bf16>>().is_ok();
        if !is_hopper {
            compiled.info::<kernels::gemm_mma<bf16>>()?;
        }
        let hopper = is_hopper.then(|| stream.context().device_name()).transpose()?;
        let slices = || launches::slice_memory(&compiled, stream.context());
        let slices = is_hopper.then(slices).transpose()?;
        let tuned = Mutex::new(Tuned::new(stream.context(), "gemm", 1)?);
        let order = StreamOrder::local(stream.context());
        let (stream, constant_b, plans) = (stream.clone(), false, Mutex::default());
        Ok(Self { compiled, stream, hopper, constant_b, slices, order, plans, tuned })
    }

    /// Lets a product read B before the previous kernels of the stream have ended. B may be
    /// weights, for instance, which no kernel writes.
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(mut self) -> Self {
        self.constant_b = true;
        self
    }

    /// Returns how products of bf16 in bf16 of this shape are computed, if the buffers are aligned
    /// to 16 bytes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements or too large a one; those of the
    /// driver.
    pub fn plan(&self, shape: [usize; 3]) -> Result<GemmPlan> {
        self.plan_of(Extents::new(shape)?)
    }

    pub(crate) fn plan_of(&self, extents: Extents) -> Result<GemmPlan> {
        Ok(self.prepare::<bf16, bf16>(extents, NOT_TRANSPOSED)?.0)
    }

    /// Returns the plans by which this GPU can compute products of bf16 of this shape, the one that
    /// is expected to be the fastest first. Errors are those of [`plan`](Self::plan).
    pub fn plans(&self, shape: [usize; 3]) -> Result<Vec<GemmPlan>> {
        let extents = Extents::new(shape)?;
        let expected = self.expected(extents, shape[2].is_multiple_of(8))?;
        // The portable plan is the first of the expected ones only if the cache folder names it for
        // this shape: the model does not propose it.
        let is_portable = expected.first() == Some(&GemmPlan::Portable);
        let mut plans = self.possible(expected, extents)?;
        plans.insert(if is_portable { 0 } else { plans.len() }, GemmPlan::Portable);
        Ok(plans)
    }

    /// Computes products of bf16 in bf16 of this shape by this plan from now on. Errors are those
    /// of [`plans`](Self::plans), and [`Error::InvalidInput`] for a plan that is not among these.
    pub fn set_plan(&self, shape: [usize; 3], plan: GemmPlan) -> Result<()> {
        refuse_if!(
            !self.plans(shape)?.contains(&plan),
            "the plan `{plan}` is none for {shape:?} on this GPU"
        );
        self.select(Extents::new(shape)?, plan).map(drop)
    }

    /// Sets the plan as [`set_plan`](Self::set_plan) does, and saves it in the cache folder: every
    /// `Gemm` that is made later for a GPU of this kind uses it, if no table has the shape. On
    /// simulated GPUs nothing is saved. Errors are those of [`set_plan`](Self::set_plan).
    pub fn keep_plan(&self, shape: [usize; 3], plan: GemmPlan) -> Result<()> {
        self.set_plan(shape, plan)?;
        self.tuned.lock().save(Extents::new(shape)?, plan);
        Ok(())
    }

    /// Times the plan of a table and those [`plans`](Self::plans) of this shape that the model
    /// expects to take at most 1.5 times as long as its fastest, and computes products of bf16 in
    /// bf16 of the shape by the fastest from now on. Each is launched 17 times, and the promising
    /// ones 48 times more, as [`launch`](Self::launch) with these buffers, as much of which is in
    /// the L2 cache as fits there. The expected plan is chosen if no other one is faster by more
    /// than 2 %. Plans add in different orders: the last bits of C may depend on the choice. The
    /// chosen plan is saved in the cache folder, as by [`keep_plan`](Self::keep_plan). Where the
    /// portable plan is the only one, nothing is launched. Errors are those of
    /// [`launch`](Self::launch), and [`Error::InvalidInput`] for buffers that are not aligned to 16
    /// bytes, if aligned ones have several plans.
    pub fn measure<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<GemmPlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        self.stream.context().refuse_capturing("Gemm::measure is called")?;
        let extents = Extents::new(shape)?;
        let before = self.plan_of(extents)?;
        let plans = self.possible(self.likely(extents)?, extents)?;
        // There are none if the portable plan is the only one: it is `before`, and is chosen again.
        let expected = plans.first().copied().unwrap_or(before);
        if !plans.is_empty() {
            // With unaligned buffers the portable kernel would run whatever plan is timed.
            let [m, n, k] = shape;
            let context = self.stream.context();
            aligned(context, "A", &a.device_slice(), m, k)?;
            aligned(context, "B", &b.device_slice(), n, k)?;
            aligned(context, "C", &c.device_slice(), m, n)?;
        }
        let chosen = timing::fastest(
            &self.stream,
            &plans,
            expected,
            |plan| self.select(extents, plan).map(drop),
            || self.launch(a, b, c, shape),
            Ok,
        );
        let selected = self.select(extents, *chosen.as_ref().unwrap_or(&before));
        let plan = chosen?;
        selected?;
        self.tuned.lock().save(extents, plan);
        Ok(plan)
    }

    /// Returns those of the plans for which the GPU has room.
    fn possible(&self, plans: Vec<GemmPlan>, extents: Extents) -> Result<Vec<GemmPlan>> {
        let can = |plan| Ok(self.prepare_plan::<bf16, bf16>(plan, extents)?.map(|_| plan));
        plans.into_iter().filter_map(|plan| can(plan).transpose()).collect()
    }

    /// Returns the plans that may be the fastest, the expected one first.
    pub(crate) fn likely(&self, extents: Extents) -> Result<Vec<GemmPlan>> {
        let [.., k] = extents.array();
        let plans = self.modelled(extents, k.is_multiple_of(8), LIKELY, || None)?;
        Ok(if plans.is_empty() { vec![GemmPlan::Portable] } else { plans })
    }

    /// Computes products of bf16 of this shape by a plan from now on, and returns whether the GPU
    /// has room for the plan. If it has not, the portable kernel computes the products.
    pub(crate) fn select(&self, extents: Extents, plan: GemmPlan) -> Result<bool> {
        let prepared = self.prepare_plan::<bf16, bf16>(plan, extents)?;
        let problem = ([bf16::DATA_TYPE; 2], extents, NOT_TRANSPOSED);
        self.plans.lock().permanent.insert(problem, (plan, prepared));
        Ok(prepared.is_some() || plan == GemmPlan::Portable)
    }

    /// Returns the first of the [`expected`](Self::expected) plans that can be prepared, or else
    /// the portable one, and remembers it for this problem (in `plans`).
    fn prepare<T: GemmElement, O: GemmOutput<T>>(
        &self,
        extents: Extents,
        transposed: [bool; 2],
    ) -> Result<Planned> {
        let problem = ([T::DATA_TYPE, O::DATA_TYPE], extents, transposed);
        if let Some(prepared) = self.plans.lock().get(&problem) {
            return Ok(prepared);
        }
        let mut chosen = (GemmPlan::Portable, None);
        // TMA needs rows of a multiple of 16 bytes in memory: of a multiple of `unit` elements.
        let unit = 16 / size_of::<T>() as u32;
        let [m, n, k] = extents.array();
        let [a, b] = transposed;
        let row_lengths = [if a { m } else { k }, if b { n } else { k }];
        let aligned = row_lengths.iter().all(|length| length.is_multiple_of(unit));
        let plans = self.expected(extents, aligned)?.into_iter();
        // Only the kernel of `Wide`, among these plans' kernels, takes A and B stored transposed.
        let can = |plan: &GemmPlan| transposed == NOT_TRANSPOSED || *plan == GemmPlan::Wide;
        for plan in plans.filter(can) {
            if plan == GemmPlan::Portable && T::DATA_TYPE == O::DATA_TYPE {
                // The cache folder names the portable plan, which `chosen` has already. (It was the
                // fastest with C of the type of A and B; with another C, the next plan is tried.)
                break;
            }
            if let Some(prepared) = self.prepare_plan::<T, O>(plan, extents)? {
                chosen = (plan, Some(prepared));
                break;
            }
        }
        self.plans.lock().insert(problem, chosen);
        Ok(chosen)
    }

    /// Returns the plans for a shape, without the portable one unless it was measured to be the
    /// fastest. The plan that is expected to be the fastest is the first: that of a table or of a
    /// measurement on this machine, if there is one. The others are those of the model, in its
    /// order. There are none on GPUs other than Hopper, or if rows of A and B are not aligned.
    fn expected(&self, extents: Extents, is_aligned: bool) -> Result<Vec<GemmPlan>> {
        self.modelled(extents, is_aligned, f64::INFINITY, || self.tuned.lock().plan(extents))
    }

    /// Returns the plans for a shape as [`expected`](Self::expected) does, without those that the
    /// model expects to take more than `times` as long as its fastest. `tuned` returns the plan
    /// that was measured on this machine.
    fn modelled(
        &self,
        extents: Extents,
        is_aligned: bool,
        times: f64,
        tuned: impl FnOnce() -> Option<GemmPlan>,
    ) -> Result<Vec<GemmPlan>> {
        let Some(name) = self.hopper.as_deref().filter(|_| is_aligned) else {
            return Ok(Vec::new());
        };
        let first = measured(name, extents).or_else(tuned);
        let room = launches::room(&self.compiled, self.stream.context())?;
        let candidates = Candidates::new(extents, room);
        let others = candidates.within(times).filter(|plan| Some(*plan) != first);
        Ok(first.into_iter().chain(others).collect())
    }

    /// Enqueues one product of `[m, n, k]`, as [`Product::launch`] does, with nothing added.
    pub fn launch<A, B, C, T>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = T>,
        B: Buffer<Element = T>,
        C: Buffer<Element = T::Output>,
        T: GemmElement,
    {
        self.product(shape).launch(a, b, c)
    }
}

impl std::fmt::Debug for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gpu = self.hopper.as_deref().unwrap_or("portable");
        let b = if self.constant_b { "constant" } else { "variable" };
        write!(f, "Gemm({gpu}, B {b})")
    }
}
