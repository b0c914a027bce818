//! The matrix product fused with an all-reduce: its workspace and its launches, with their checks.

mod plan;

use devcomm_host::{
    Buffer, Communicator, Context, DevCommRequirements, DevCommResource, DeviceSlice, Element,
    Kernels, LaunchConfig, Result, Stream, TensorMapDesc, Window,
};
use devcomm_kernels::{self as kernels, GemmForm};
use half::bf16;

pub use self::plan::GemmOptions;
use self::plan::Plan;
use crate::check::{check_buffer, check_shape, refuse, require_context};

/// `C = sum over the ranks of A x B^T`, on one communicator and one stream: owns the loaded kernels
/// and their workspace, and launches them.
///
/// Each rank has `m x k` elements of A and `n x k` of B, row-major: its slice of the dimension that
/// is summed over. Every rank gets the `m x n` elements of C, row-major. Sums are in f32, also over
/// the ranks, and rounded once. [`GemmForm`] lists the kernels.
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

    fn build(plan: Plan, comm: &Communicator, stream: &Stream) -> Result<Self> {
        let Plan { compiled, form, blocks, workspace } = plan;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?;
        // New windows are zeroed, as the flags must be.
        let (partials, flags) = (comm.window(workspace.partials)?, comm.window(workspace.flags)?);
        // All ranks' flags are zeroed before any kernel sets one.
        comm.barrier()?;
        let (communicator, stream) = (comm.clone(), stream.clone());
        Ok(Self { compiled, stream, communicator, form, blocks, dev_comm, partials, flags })
    }

    /// The selected form.
    #[must_use]
    pub fn form(&self) -> GemmForm {
        self.form
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
