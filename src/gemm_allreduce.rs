//! The launch of the fused product and all-reduce, with all that can be wrong with it checked before.

use devcomm_host::{
    Buffer, Communicator, Context, DevCommRequirements, DevCommResource, Error, Kernels,
    LaunchConfig, Rank, Result, Stream, Tiling, Window,
};
use devcomm_kernels::{self as kernels, GemmForm};
use half::bf16;

/// `C = sum over the ranks of A x B^T`, on one communicator and one stream: the workspace, and the launches.
///
/// A rank has `m x k` elements of A and `n x k` of B, row-major, its slice of the dimension that is summed over; every rank gets
/// the `m x n` elements of C, row-major. Products are summed in f32, over the ranks too, and rounded once. [`kernels::GemmForm`]'s module
/// says how.
///
/// ```no_run
/// use devcomm::{GemmAllReduce, KERNELS, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let comm = rank.communicator()?;
///     let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = comm.window::<bf16>(m * n)?;
///     let gemm = GemmAllReduce::new(rank, comm, &compiled, &stream, m, n)?;
///     gemm.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct GemmAllReduce<'a> {
    compiled: &'a Kernels,
    stream: &'a Stream,
    context: Context,
    form: GemmForm,
    blocks: u32,
    n_ranks: usize,
    dev_comm: DevCommResource,
    partials: Window<f32>,
    flags: Window<u32>,
}

impl<'a> GemmAllReduce<'a> {
    /// For products of up to `m x n` elements. Takes the form that suits the GPU.
    ///
    /// Every rank of `comm`, which is all of `rank`'s world, calls it with the same numbers. The workspace takes `4 * m * n` bytes on each
    /// GPU, rounded up to whole tiles.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a product without elements or one that is too large, [`Error::SeveralLsaTeams`] when the ranks do not
    /// reach each other's memory, and what making windows and a device communicator gives.
    pub fn new(
        rank: &Rank,
        comm: &Communicator,
        compiled: &'a Kernels,
        stream: &'a Stream,
        m: usize,
        n: usize,
    ) -> Result<Self> {
        let hopper = compiled.info(kernels::gemm_allreduce_wgmma).is_ok();
        let form = if hopper { GemmForm::Wgmma } else { GemmForm::Mma };
        Self::with_form(rank, comm, compiled, stream, form, m, n)
    }

    /// [`new`](Self::new) with a form of the caller's choice.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::WrongArch`] for a form that this GPU does not run.
    pub fn with_form(
        rank: &Rank,
        comm: &Communicator,
        compiled: &'a Kernels,
        stream: &'a Stream,
        form: GemmForm,
        m: usize,
        n: usize,
    ) -> Result<Self> {
        comm.require_single_lsa_team()?;
        let n_ranks = comm.n_ranks();
        if n_ranks != rank.n_ranks() {
            let all = rank.n_ranks();
            return refuse(format!("a communicator of {n_ranks} ranks, but the world has {all}"));
        }
        if m == 0 || n == 0 {
            return refuse(format!("a product of {m} x {n} elements has none"));
        }
        let Some(sizes) = form.workspace(m, n, n_ranks) else {
            return refuse(format!("a product of {m} x {n} elements is too large to be counted"));
        };
        let blocks = match form {
            GemmForm::Wgmma => resident(compiled, kernels::gemm_allreduce_wgmma, form),
            GemmForm::Mma => resident(compiled, kernels::gemm_allreduce_mma, form),
        }?;
        // GPUs of several kinds take as many as the smallest has.
        let all = rank.all_gather(&blocks.to_le_bytes())?;
        let all = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
        let blocks = all.map(u32::from_le_bytes).min().unwrap_or(blocks);
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?;
        let (partials, flags) =
            (comm.window::<f32>(sizes.partials)?, comm.window::<u32>(sizes.flags)?);
        flags.fill(0)?;
        // No rank's kernel sets a flag before it is cleared.
        rank.barrier()?;
        let context = comm.context().clone();
        Ok(Self { compiled, stream, context, form, blocks, n_ranks, dev_comm, partials, flags })
    }

    /// The form that is launched.
    #[must_use]
    pub fn form(&self) -> GemmForm {
        self.form
    }

    /// Enqueues one product of `[m, n, k]`: `m * k` elements of `a` and `n * k` of `b`, the sum to the first `m * n` elements of `c` in every
    /// rank. What follows on the stream sees all of it.
    ///
    /// Every rank calls it with the same shape and the same window, in the same order. Nothing but this stream's work touches `c` meanwhile.
    /// It can be captured to a graph.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements, a `k` that is not a multiple of 8, buffers and windows that are too short or not
    /// aligned to 16 bytes, or a product that this workspace is too small for; what a launch gives.
    pub fn launch<A, B>(&self, a: &A, b: &B, c: &Window<bf16>, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        self.enqueue(a, b, c, shape, false)
    }

    /// The product alone: each rank's own, to its own part of `c`. For measurements.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn launch_alone<A, B>(
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
        self.enqueue(a, b, c, shape, true)
    }

    fn enqueue<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
        alone: bool,
    ) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        let (a, b) = (a.device_slice(), b.device_slice());
        let [m, n, k] = check_shape(shape)?;
        let [rows, columns, terms] = shape;
        check_buffer("A", a.device_address(), a.len(), rows, terms)?;
        check_buffer("B", b.device_address(), b.len(), columns, terms)?;
        check_buffer("C", c.device_address(), c.len(), rows, columns)?;
        let room = self.form.workspace(rows, columns, self.n_ranks).filter(|sizes| {
            sizes.partials <= self.partials.len() && sizes.flags <= self.flags.len()
        });
        let (Some(_), Some(tiles)) = (room, self.form.tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {rows} x {columns} elements needs a larger workspace: make another GemmAllReduce for it"
            ));
        };
        let config = LaunchConfig::new(self.blocks.min(tiles), self.form.threads())
            .with_dynamic_shared(self.form.dynamic_shared());
        let (comm, partials, flags) = (&self.dev_comm, &self.partials, &self.flags);
        // SAFETY: the shape is none that the kernel excludes, buffers and windows have the elements at addresses that are multiples of 16,
        // and dropping them waits for the stream. The workspace has the sizes for the shape, its flags were 0 when it was made, and
        // launches on one stream follow each other. Grids are equal where shapes are. Ranks that launch other shapes or windows get
        // wrong sums or wait for ever, as in every collective, but stay within the windows: every index is below what was checked
        // here, and a window is as long in all ranks.
        unsafe {
            match self.form {
                GemmForm::Wgmma => {
                    let map = |address, rows, tile_rows| {
                        let tiling = Tiling { address, rows, columns: k, tile_rows };
                        self.context.tensor_map(&tiling)
                    };
                    let a = map(a.device_address(), m, GemmForm::TILE_ROWS as u32)?;
                    let b = map(b.device_address(), n, self.form.tile_columns() as u32)?;
                    let args = (comm, a, b, c, partials, flags, m, n, k, alone);
                    let kernel = kernels::gemm_allreduce_wgmma;
                    self.compiled.launch(self.stream, kernel, config, args)
                }
                GemmForm::Mma => {
                    let (a, b) = (a.device_address(), b.device_address());
                    let args = (comm, a, b, c, partials, flags, m, n, k, alone);
                    self.compiled.launch(self.stream, kernels::gemm_allreduce_mma, config, args)
                }
            }
        }
    }
}

impl std::fmt::Debug for GemmAllReduce<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmAllReduce({:?}, {} blocks)", self.form, self.blocks)
    }
}

fn resident<K: devcomm_types::Kernel>(
    compiled: &Kernels,
    kernel: K,
    form: GemmForm,
) -> Result<u32> {
    compiled.resident_blocks(kernel, form.threads(), form.dynamic_shared())
}

/// The shape in the kernel's numbers.
fn check_shape([m, n, k]: [usize; 3]) -> Result<[u32; 3]> {
    if m == 0 || n == 0 || k == 0 {
        return refuse(format!("a product of {m} x {n} elements with {k} terms has nothing to do"));
    }
    if !k.is_multiple_of(8) {
        return refuse(format!(
            "k is {k}, but rows of A and B begin on 16 bytes: pad them with zeros to a multiple of 8 elements"
        ));
    }
    // The copy engine's coordinates have a sign.
    let most = i32::MAX as usize - 512;
    if m > most || n > most || k > most {
        return refuse(format!(
            "a product of {m} x {n} elements with {k} terms: {most} is the most"
        ));
    }
    Ok([m as u32, n as u32, k as u32])
}

fn check_buffer(name: &str, address: u64, len: usize, rows: usize, columns: usize) -> Result<()> {
    if rows.checked_mul(columns).is_none_or(|needed| len < needed) {
        return refuse(format!("{name} has {len} elements, but is {rows} x {columns}"));
    }
    if !address.is_multiple_of(16) {
        return refuse(format!("{name} begins at {address:#x}, which is no multiple of 16 bytes"));
    }
    Ok(())
}

fn refuse<T>(what: String) -> Result<T> {
    Err(Error::InvalidInput { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T>(result: Result<T>) -> String {
        match result {
            Ok(_) => "it was accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_shape_that_the_kernel_cannot_do_is_refused_with_the_reason() {
        assert_eq!(check_shape([1, 7, 8]).unwrap(), [1, 7, 8]);
        assert!(message(check_shape([0, 7, 8])).contains("nothing to do"));
        assert!(message(check_shape([1, 7, 0])).contains("nothing to do"));
        assert!(message(check_shape([1, 7, 12])).contains("k is 12"));
        assert!(message(check_shape([1, 1 << 32, 8])).contains("is the most"));
    }

    #[test]
    fn a_matrix_that_is_too_short_or_not_aligned_is_refused_by_its_name() {
        assert!(check_buffer("A", 0x100, 56, 7, 8).is_ok());
        assert!(message(check_buffer("A", 0x100, 55, 7, 8)).contains("A has 55 elements"));
        assert!(message(check_buffer("C", 0x108, 56, 7, 8)).contains("C begins at 0x108"));
        assert!(message(check_buffer("B", 0, usize::MAX, usize::MAX, 2)).contains("B has"));
    }
}
