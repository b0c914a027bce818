//! The matrix product on one GPU, with the checks of its launches.

mod element;
mod grouped;
mod launches;
mod model;
mod plan;
mod product;

use devcomm_host::DeviceBuffer;
use parking_lot::Mutex;

pub use self::element::{GemmElement, GemmOutput, HalfElement, ScaledElement};
pub use self::grouped::{GroupedGemm, RowGroups};
use self::launches::Prepared;
pub(crate) use self::launches::{
    Matrices, TileKernel, division_args, map, swapped_maps, wide_grid, wide_maps, wide_pairs,
};
pub(crate) use self::model::ResidentClusters;
pub(crate) use self::plan::{Candidates, LIKELY, clusters, measured};
pub use self::plan::{GemmPlan, Tiling};
pub(crate) use self::product::Added;
pub use self::product::{Activation, Product};
use crate::decisions::Cache;
use crate::prelude::*;
use crate::timing;
use crate::tuned::Tuned;

/// `C = A x B^T` on one GPU and one stream: owns the loaded kernels, and launches them.
///
/// A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its weights) and C `m x n`, all
/// row-major. Sums are in f32 and rounded once. A and B are of bf16, f16 or 8-bit floats, C is of
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
/// GPU, or from a model; [`measure`](Self::measure) finds the fastest. Products of f16 have the
/// plans of bf16; products of 8-bit floats have one.
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
    /// The memory of plans with slices, on Hopper, which products use in this order.
    slices: Option<SliceMemory>,
    order: StreamOrder,
    plans: Mutex<Cache<Problem, Planned>>,
    tuned: Mutex<Tuned<GemmPlan>>,
}

/// The sums and arrivals of [`Slices`](kernels::gemm::slices::Slices) for all resident blocks.
type SliceMemory = (DeviceBuffer<f32>, DeviceBuffer<u32>);
/// The types of the factors and of C, a shape, and whether A and B are transposed.
type Problem = ([DataType; 2], Extents, [bool; 2]);
/// A and B as they are by default.
const NOT_TRANSPOSED: [bool; 2] = [false; 2];
/// The plan for a shape, prepared if it is not the portable one.
type Planned = (GemmPlan, Option<Prepared>);

const FILES: &[&str] = &[
    kernels::gemm_wgmma::<bf16>::FILE,
    kernels::gemm_swapped::<bf16, kernels::gemm::gemm_swapped::M8N64>::FILE,
    kernels::gemm_unswapped::<bf16, kernels::gemm::gemm_swapped::M96N64>::FILE,
    kernels::gemm_blocks::<F8E4M3>::FILE,
    kernels::gemm_mma::<bf16>::FILE,
];

impl Gemm {
    /// Prepares products launched on `stream`. On Hopper it allocates 15 MB, for sums of which
    /// several blocks compute slices.
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

    /// Lets a product read B before the previous kernels of the stream have ended: weights, for
    /// instance, which no kernel writes.
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
        // The portable plan is the expected one only if it was kept.
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

    /// Sets the plan as [`set_plan`](Self::set_plan) does, and keeps it in the cache folder for
    /// every later `Gemm` of this kind of GPU, if the shape is in no table and the GPU is not
    /// simulated.
    pub fn keep_plan(&self, shape: [usize; 3], plan: GemmPlan) -> Result<()> {
        self.set_plan(shape, plan)?;
        self.tuned.lock().save(Extents::new(shape)?, plan);
        Ok(())
    }

    /// Times the plan of a table and those [`plans`](Self::plans) of this shape that the model
    /// expects to take at most 1.5 times as long as its fastest, and [keeps](Self::keep_plan) the
    /// fastest, or the expected one if none is faster by more than 2 %. Each is launched 17 times,
    /// and the promising ones 48 times more, with these buffers, of which the L2 cache keeps what
    /// it can. Plans add in different orders: the last bits of C may depend on the choice. Where
    /// the portable plan is the only one, nothing is launched. Errors are those of
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
        // There are none if the portable kernel is the only one: it is `before`, and stays.
        let expected = plans.first().copied().unwrap_or(before);
        if !plans.is_empty() {
            // By the portable kernel all plans would take the same time, but for noise.
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

    /// Computes products of bf16 of this shape by a plan from now on, or by the portable kernel if
    /// the GPU has no room for it; returns whether it has.
    pub(crate) fn select(&self, extents: Extents, plan: GemmPlan) -> Result<bool> {
        let prepared = self.prepare_plan::<bf16, bf16>(plan, extents)?;
        let problem = ([bf16::DATA_TYPE; 2], extents, NOT_TRANSPOSED);
        self.plans.lock().permanent.insert(problem, (plan, prepared));
        Ok(prepared.is_some() || plan == GemmPlan::Portable)
    }

    /// Returns the first of the [`expected`](Self::expected) plans that can be prepared, or the
    /// portable one, and keeps it.
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
        // TMA needs stored rows of a multiple of 16 bytes: of this number of elements.
        let unit = 16 / size_of::<T>() as u32;
        let [m, n, k] = extents.array();
        let [a, b] = transposed;
        let row_lengths = [if a { m } else { k }, if b { n } else { k }];
        let aligned = row_lengths.iter().all(|length| length.is_multiple_of(unit));
        let plans = self.expected(extents, aligned)?.into_iter();
        // Only `gemm_wgmma`, among these plans' kernels, takes A and B stored transposed.
        let can = |plan: &GemmPlan| transposed == NOT_TRANSPOSED || *plan == GemmPlan::Wide;
        for plan in plans.filter(can) {
            if plan == GemmPlan::Portable && T::DATA_TYPE == O::DATA_TYPE {
                break; // It is the plan that was kept, and `chosen` has it.
            }
            if let Some(prepared) = self.prepare_plan::<T, O>(plan, extents)? {
                chosen = (plan, Some(prepared));
                break;
            }
        }
        self.plans.lock().insert(problem, chosen);
        Ok(chosen)
    }

    /// Returns the plans for a shape on a Hopper GPU, if rows of A and B are aligned: that of a
    /// table or of a measurement on this machine, if there is one, and then those of the model.
    fn expected(&self, extents: Extents, is_aligned: bool) -> Result<Vec<GemmPlan>> {
        self.modelled(extents, is_aligned, f64::INFINITY, || self.tuned.lock().plan(extents))
    }

    /// Does what [`expected`](Self::expected) does, but for plans that the model expects to take
    /// more than this many times as long as its fastest, and with the measurement `tuned`.
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
