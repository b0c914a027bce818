//! The matrix product fused with an all-reduce: its workspace and its launches, with their checks.

mod agree;
mod messages;
mod plan;
mod swapped;
mod wide;

use std::cell::{Cell, OnceCell};

use devcomm_host::{
    Buffer, Communicator, Context, DevCommRequirements, DevCommResource, DeviceSlice, Element,
    Kernels, LaunchConfig, ReduceOp, Result, Stream, TensorMapDesc, Window,
};
use devcomm_kernels::{self as kernels, GemmForm};
use half::bf16;

pub use self::agree::GemmOptions;
use self::agree::Plan;
pub(crate) use self::agree::agree_on;
pub(crate) use self::messages::Messages;
pub use self::plan::{GemmAllReducePlan, ParseGemmAllReducePlanError};
use self::swapped::Swapped;
use self::wide::Wide;
use crate::check::{check_buffer, check_shape, refuse, require_context};
use crate::gemm::{Matrices, candidates, measured};
use crate::{Collectives, Explanation, Gemm};

/// `C = sum over the ranks of A x B^T`, on one communicator and one stream: owns the loaded kernels
/// and their workspace, and launches them.
///
/// Each rank has `m x k` elements of A and `n x k` of B, row-major: its slice of the dimension that
/// is summed over. Every rank gets the `m x n` elements of C, row-major. Sums are in f32, also over
/// the ranks, and rounded once. [`GemmForm`] lists the kernels.
///
/// That is [`GemmAllReducePlan::Strips`]; [`set_plan`](Self::set_plan) selects another plan, some
/// of which round each rank's product before the sum. Which is fastest is not measured yet.
///
/// ```no_run
/// use devcomm::{GemmAllReduce, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = comm.window::<bf16>(m * n)?;
///     let gemm = GemmAllReduce::new(comm, &stream, m, n)?;
///     gemm.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct GemmAllReduce {
    compiled: Kernels,
    stream: Stream,
    communicator: Communicator,
    form: GemmForm,
    blocks: u32,
    dev_comm: DevCommResource,
    partials: Window<f32>,
    flags: Window<u32>,
    /// The largest product, `m x n`.
    most: [usize; 2],
    /// Whether all GPUs are of the Hopper family.
    hopper: bool,
    constant_b: bool,
    /// The plan that was asked for, and what the plans need that were.
    plan: Cell<Option<GemmAllReducePlan>>,
    wide: OnceCell<Wide>,
    swapped: OnceCell<Swapped>,
    unfused: OnceCell<(Gemm, Collectives)>,
}

impl GemmAllReduce {
    /// For products of up to `m x n` elements, launched on `stream`. Selects the fastest form that
    /// the GPUs of all ranks support, from this crate's [`KERNELS`](crate::KERNELS); [`options`]
    /// selects others. *Collective*, with the same `m` and `n` on every rank.
    ///
    /// The workspace takes `4 * m * n` bytes on each GPU, rounded up to whole tiles.
    ///
    /// [`options`]: Self::options
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a product without elements or one that is too large, for
    /// arguments that differ between the ranks, a stream of another context, and a communicator
    /// that was created without a `World`; [`DevCommError::SeveralLsaTeams`] when the ranks are not
    /// in one LSA team; errors of loading kernels and of creating windows and a device
    /// communicator. An error on one rank is an error on all.
    ///
    /// [`Error::InvalidInput`]: devcomm_host::Error::InvalidInput
    /// [`DevCommError::SeveralLsaTeams`]: devcomm_host::DevCommError::SeveralLsaTeams
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        Self::options().build(comm, stream, m, n)
    }

    /// The options, with their default values.
    pub fn options() -> GemmOptions {
        GemmOptions::new()
    }

    fn build(plan: Plan, comm: &Communicator, stream: &Stream, most: [usize; 2]) -> Result<Self> {
        let Plan { compiled, form, blocks, workspace, hopper } = plan;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?;
        // New windows are zeroed, as the flags must be.
        let (partials, flags) = (comm.window(workspace.partials)?, comm.window(workspace.flags)?);
        // All ranks' flags are zeroed before any kernel sets one.
        comm.barrier()?;
        let (communicator, stream) = (comm.clone(), stream.clone());
        Ok(Self {
            compiled,
            stream,
            communicator,
            form,
            blocks,
            dev_comm,
            partials,
            flags,
            most,
            hopper,
            constant_b: false,
            plan: Cell::default(),
            wide: OnceCell::new(),
            swapped: OnceCell::new(),
            unfused: OnceCell::new(),
        })
    }

    /// The selected form.
    #[must_use]
    pub fn form(&self) -> GemmForm {
        self.form
    }

    /// Lets [`Swapped`](GemmAllReducePlan::Swapped) read B before the previous kernels of the
    /// stream have ended: weights, for instance, which no kernel writes. Before
    /// [`set_plan`](Self::set_plan) also [`Unfused`](GemmAllReducePlan::Unfused).
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(mut self) -> Self {
        self.constant_b = true;
        self
    }

    /// The plans for products of `[m, n, k]`, the default first, those for few rows last, and of
    /// these first the one by which [`Gemm`] multiplies.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape that no product has;
    /// those of the driver.
    pub fn plans(&self, shape: [usize; 3]) -> Result<Vec<GemmAllReducePlan>> {
        let mut plans = vec![GemmAllReducePlan::Strips, GemmAllReducePlan::Unfused];
        let extents = check_shape(shape)?;
        if !self.exchanges() {
            return Ok(plans);
        }
        if wide::supports(shape, self.most) {
            plans.push(GemmAllReducePlan::Wide);
        }
        if swapped::is_for(shape) {
            let multiprocessors = self.context().limits().multiprocessors;
            let measured = measured(&self.context().device_name()?, extents);
            let all = measured.into_iter().chain(candidates(extents, multiprocessors));
            for plan in all.filter_map(GemmAllReducePlan::of_few_rows) {
                if !plans.contains(&plan) {
                    plans.push(plan);
                }
            }
        }
        Ok(plans)
    }

    /// Whether two ranks can exchange rounded products.
    fn exchanges(&self) -> bool {
        self.hopper && self.communicator.n_ranks() == 2
    }

    /// How a product of `[m, n, k]` would be done, and why.
    #[must_use]
    pub fn explain(&self, shape: [usize; 3]) -> Explanation<GemmAllReducePlan> {
        let can = |plan: &GemmAllReducePlan| match *plan {
            GemmAllReducePlan::Strips | GemmAllReducePlan::Unfused => true,
            GemmAllReducePlan::Wide => wide::supports(shape, self.most),
            GemmAllReducePlan::Swapped { rows, columns, cluster } => {
                let swapped = self.swapped.get();
                swapped.is_some_and(|swapped| swapped.supports((rows, columns, cluster), shape))
            }
        };
        match self.plan.get().filter(can) {
            Some(plan) => Explanation { plan, reason: "as it was set" },
            None => Explanation {
                plan: GemmAllReducePlan::Strips,
                reason: "as no other plan was set that can do it",
            },
        }
    }

    /// Does all products that this plan can do by it. Every rank sets the same plan between the
    /// same products. *Collective*.
    ///
    /// The first time that a plan is set, its workspace is allocated: for
    /// [`Wide`](GemmAllReducePlan::Wide) `4 * m * n` bytes of the largest product, for
    /// [`Swapped`](GemmAllReducePlan::Swapped) twice as many for up to 256 rows, for
    /// [`Unfused`](GemmAllReducePlan::Unfused) that of [`Collectives`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a plan that needs other GPUs
    /// or another number of ranks; those of loading kernels and of creating windows and a device
    /// communicator.
    pub fn set_plan(&self, plan: Option<GemmAllReducePlan>) -> Result<()> {
        let (comm, [m, n]) = (&self.communicator, self.most);
        match plan {
            None | Some(GemmAllReducePlan::Strips) => {}
            Some(GemmAllReducePlan::Unfused) => {
                if self.unfused.get().is_none() {
                    let own = Gemm::new(&self.stream).map(|gemm| (gemm, [0; 2]));
                    let (mut gemm, _) = agree::agree_on(comm, own)?;
                    if self.constant_b {
                        // SAFETY: the contract of `with_constant_b`.
                        gemm = unsafe { gemm.with_constant_b() };
                    }
                    let _ = self.unfused.set((gemm, Collectives::new(comm)?));
                }
            }
            Some(plan) if !self.exchanges() => {
                return refuse(format!(
                    "the plan `{plan}` needs two ranks with Hopper GPUs: there are {} ranks, form \
                     {:?}",
                    comm.n_ranks(),
                    self.form
                ));
            }
            Some(GemmAllReducePlan::Wide) => {
                if self.wide.get().is_none() {
                    let _ = self.wide.set(Wide::new(comm, m, n)?);
                }
            }
            Some(GemmAllReducePlan::Swapped { rows, columns, cluster }) => {
                if self.swapped.get().is_none() {
                    let _ = self.swapped.set(Swapped::new(comm, m, n)?);
                }
                if let Some(swapped) = self.swapped.get() {
                    swapped.prepare(comm, (rows, columns, cluster))?;
                }
            }
        }
        self.plan.set(plan);
        Ok(())
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// stores the sum to the first `m * n` elements of `c` in every rank. Later work on the stream
    /// sees the whole result.
    ///
    /// Every rank calls it with the same shape and the same window, in the same order. Only work on
    /// this stream may access `c` until the product has ended. Products of two `GemmAllReduce`s on
    /// two streams deadlock if the ranks launch them in different orders.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, a
    /// `k` that is not a multiple of 8, buffers and windows that are too short, not aligned to 16
    /// bytes or of another context or communicator, or a product that is too large for this
    /// workspace; [`StateError::Capturing`](devcomm_host::StateError::Capturing) during a stream
    /// capture (use [`launch_capturable`](Self::launch_capturable)); errors of the launch.
    pub fn launch<A, B>(&self, a: &A, b: &B, c: &Window<bf16>, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        self.context().refuse_capturing("GemmAllReduce::launch is called")?;
        // SAFETY: no capture is active.
        unsafe { self.enqueue(&a.device_slice(), &b.device_slice(), c, shape, false) }
    }

    /// As [`launch`](Self::launch), but also allowed during a stream capture.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), except
    /// [`StateError::Capturing`](devcomm_host::StateError::Capturing).
    ///
    /// # Safety
    ///
    /// In a capture: while the graph can be launched, `a`, `b`, `c` and this object are not
    /// dropped, and `c` is open. The graph is launched on this object's stream, or events order it
    /// with all other launches of this object.
    pub unsafe fn launch_capturable<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        // SAFETY: the caller's contract.
        unsafe { self.enqueue(&a.device_slice(), &b.device_slice(), c, shape, false) }
    }

    /// The product without the all-reduce: each rank stores its own product to its own memory of
    /// `c`. For measurements.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn launch_local<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        self.context().refuse_capturing("GemmAllReduce::launch_local is called")?;
        // SAFETY: no capture is active.
        unsafe { self.enqueue(&a.device_slice(), &b.device_slice(), c, shape, true) }
    }

    fn context(&self) -> &Context {
        self.communicator.context()
    }

    /// # Safety
    ///
    /// As [`launch_capturable`](Self::launch_capturable).
    unsafe fn enqueue(
        &self,
        a: &DeviceSlice<bf16>,
        b: &DeviceSlice<bf16>,
        c: &Window<bf16>,
        shape: [usize; 3],
        local_only: bool,
    ) -> Result<()> {
        if !c.communicator().is(&self.communicator) {
            return refuse("C is a window of another communicator".to_owned());
        }
        require_context("A", a.context(), self.context())?;
        require_context("B", b.context(), self.context())?;
        let [m, n, k] = check_shape(shape)?;
        let [rows, columns, terms] = shape;
        check_buffer("A", a.device_address(), a.len(), rows, terms)?;
        check_buffer("B", b.device_address(), b.len(), columns, terms)?;
        check_buffer("C", c.device_address(), c.min_len(), rows, columns)?;
        let plan = if local_only { GemmAllReducePlan::Strips } else { self.explain(shape).plan };
        let addresses = [a.device_address(), b.device_address(), c.device_address()];
        let matrices = Matrices::plain(addresses, [m, n, k]);
        // SAFETY: the plan does the shape; the buffers are long enough, begin at multiples of 16
        // bytes, and dropping one waits for the stream; the caller ensures what a graph needs.
        // Launches on one stream are ordered.
        unsafe {
            if let (GemmAllReducePlan::Wide, Some(wide)) = (plan, self.wide.get()) {
                return wide.launch(&self.stream, matrices);
            }
            if let (GemmAllReducePlan::Swapped { rows, columns, cluster }, Some(swapped)) =
                (plan, self.swapped.get())
            {
                let tile = (rows, columns, cluster);
                return swapped.launch(&self.stream, tile, matrices, self.constant_b);
            }
            if let (GemmAllReducePlan::Unfused, Some((gemm, collectives))) =
                (plan, self.unfused.get())
            {
                let c = c.slice(..rows * columns)?;
                gemm.launch_capturable(a, b, &c, shape)?;
                return collectives.all_reduce(&c, &c, ReduceOp::Sum, &self.stream);
            }
        }
        let needed = self.form.workspace(rows, columns, self.communicator.n_ranks());
        let needed = needed.filter(|sizes| {
            sizes.partials <= self.partials.len() && sizes.flags <= self.flags.len()
        });
        let (Some(_), Some(tiles)) = (needed, self.form.tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {rows} x {columns} elements needs a larger workspace: make another \
                 GemmAllReduce for it"
            ));
        };
        let config = LaunchConfig::new(self.blocks.min(tiles), self.form.threads())
            .with_dynamic_shared(self.form.dynamic_shared());
        let (comm, partials, flags) = (&self.dev_comm, &self.partials, &self.flags);
        let target = self.compiled.on(&self.stream);
        // SAFETY: the kernel supports the shape; buffers and windows are long enough and 16-byte
        // aligned, and dropping them waits for the stream; the caller ensures what a graph needs.
        // The workspace is large enough, its flags were zeroed, and launches on one stream are
        // ordered. Equal shapes give equal grids. Ranks that launch different shapes or windows get
        // wrong sums or deadlock, as in every collective, but access nothing outside the windows:
        // every index is below the lengths checked here, which for C is the minimum over the ranks,
        // and the workspace has the same length in all ranks.
        unsafe {
            match self.form {
                GemmForm::Wgmma => {
                    let map = |address, rows, tile_rows| {
                        let tiling = TensorMapDesc {
                            address,
                            rows,
                            columns: k,
                            tile_rows,
                            data_type: bf16::DATA_TYPE,
                        };
                        self.context().tensor_map(&tiling)
                    };
                    let a = map(a.device_address(), m, GemmForm::TILE_ROWS as u32)?;
                    let b = map(b.device_address(), n, self.form.tile_columns() as u32)?;
                    let product = kernels::gemm_allreduce_wgmma::args(
                        comm, a, b, c, partials, flags, m, n, k, local_only,
                    );
                    product.config(config).launch(&target)
                }
                GemmForm::Mma => {
                    let (a, b) = (a.device_address(), b.device_address());
                    let product = kernels::gemm_allreduce_mma::args(
                        comm, a, b, c, partials, flags, m, n, k, local_only,
                    );
                    product.config(config).launch(&target)
                }
            }
        }
    }
}

impl std::fmt::Debug for GemmAllReduce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmAllReduce({:?}, {} blocks)", self.form, self.blocks)
    }
}
