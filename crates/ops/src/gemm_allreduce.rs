//! The launch of the fused product and all-reduce, with all that can be wrong with it checked before.

use std::ops::Deref;
use std::slice;

use bytemuck::{Pod, Zeroable};
use devcomm_host::{
    Buffer, Communicator, Context, DevCommRequirements, DevCommResource, DeviceSlice, Error,
    Kernels, LaunchConfig, Rank, Result, Stream, TensorMapDesc, Window,
};
use devcomm_kernels::{self as kernels, GemmForm};
use half::bf16;

/// `C = sum over the ranks of A x B^T`, on one communicator and one stream: the workspace, and the launches.
///
/// A rank has `m x k` elements of A and `n x k` of B, row-major, its slice of the dimension that is summed over; every rank gets
/// the `m x n` elements of C, row-major. Products are summed in f32, over the ranks too, and rounded once:
/// [`kernels::GemmForm`] has the kernels.
///
/// ```no_run
/// use devcomm::{GemmAllReduce, GemmOutput, KERNELS, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let comm = rank.communicator()?;
///     let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = GemmOutput::new(rank, comm, m * n)?;
///     let gemm = GemmAllReduce::new(rank, comm, &compiled, &stream, m, n)?;
///     gemm.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct GemmAllReduce<'a> {
    compiled: &'a Kernels,
    stream: &'a Stream,
    communicator: Communicator,
    form: GemmForm,
    blocks: u32,
    n_ranks: usize,
    dev_comm: DevCommResource,
    partials: Window<f32>,
    flags: Window<u32>,
}

impl<'a> GemmAllReduce<'a> {
    /// For products of up to `m x n` elements. Takes the form that suits the GPUs of all ranks.
    ///
    /// Every rank of `comm`, which is all of `rank`'s world, calls it with the same numbers. The workspace takes `4 * m * n` bytes on each
    /// GPU, rounded up to whole tiles.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a product without elements or one that is too large, numbers that differ between the ranks, and a
    /// communicator, kernels and a stream that do not belong together; [`Error::SeveralLsaTeams`] when the ranks do not reach each other's
    /// memory, and what making windows and a device communicator gives. What one rank finds fails on all.
    pub fn new(
        rank: &Rank,
        comm: &Communicator,
        compiled: &'a Kernels,
        stream: &'a Stream,
        m: usize,
        n: usize,
    ) -> Result<Self> {
        Self::make(rank, comm, compiled, stream, None, m, n)
    }

    /// [`new`](Self::new) with a form of the caller's choice, the same on all ranks.
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
        Self::make(rank, comm, compiled, stream, Some(form), m, n)
    }

    fn make(
        rank: &Rank,
        comm: &Communicator,
        compiled: &'a Kernels,
        stream: &'a Stream,
        form: Option<GemmForm>,
        m: usize,
        n: usize,
    ) -> Result<Self> {
        // No rank leaves before it has told the others why.
        let mine = wishes(rank, comm, compiled, stream, form, m, n);
        let all = rank.all_gather(mine.as_ref().map_or(&[], slice::from_ref))?;
        mine?;
        let (form, blocks) = agree(&all)?;
        let n_ranks = comm.n_ranks();
        let Some(sizes) = form.workspace(m, n, n_ranks) else {
            return refuse(format!("a product of {m} x {n} elements is too large to be counted"));
        };
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?;
        let (partials, flags) =
            (comm.window::<f32>(sizes.partials)?, comm.window::<u32>(sizes.flags)?);
        flags.fill(0)?;
        // No rank's kernel sets a flag before it is cleared.
        rank.barrier()?;
        let communicator = comm.clone();
        Ok(Self {
            compiled,
            stream,
            communicator,
            form,
            blocks,
            n_ranks,
            dev_comm,
            partials,
            flags,
        })
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
    /// Products of two `GemmAllReduce`s on two streams wait for each other for ever when the ranks launch them in different orders.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements, a `k` that is not a multiple of 8, buffers and windows that are too short, not
    /// aligned to 16 bytes or of another context or communicator, or a product that this workspace is too small for;
    /// [`Error::Capturing`] while a stream is captured, for which there is [`launch_capturable`](Self::launch_capturable); what a launch gives.
    pub fn launch<A, B>(&self, a: &A, b: &B, c: &GemmOutput, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        self.context().refuse_capturing("GemmAllReduce::launch is called")?;
        // SAFETY: nothing is captured.
        unsafe { self.enqueue(&a.device_slice(), &b.device_slice(), c, shape, false) }
    }

    /// [`launch`](Self::launch) that can be captured to a graph as well.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), but for the capture.
    ///
    /// # Safety
    ///
    /// In a capture: as long as the graph can be launched, `a`, `b`, `c`, this object and the kernels live, and `c` is open. The graph is
    /// launched to this object's stream, or ordered with all other launches of this object by events.
    pub unsafe fn launch_capturable<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &GemmOutput,
        shape: [usize; 3],
    ) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        // SAFETY: the caller's.
        unsafe { self.enqueue(&a.device_slice(), &b.device_slice(), c, shape, false) }
    }

    /// The product alone: each rank's own, to its own part of `c`. For measurements.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn launch_alone<A, B>(&self, a: &A, b: &B, c: &GemmOutput, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        self.context().refuse_capturing("GemmAllReduce::launch_alone is called")?;
        // SAFETY: nothing is captured.
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
        c: &GemmOutput,
        shape: [usize; 3],
        alone: bool,
    ) -> Result<()> {
        if !c.communicator().is(&self.communicator) {
            return refuse("C is a window of another communicator".to_owned());
        }
        require_context("A", a.context(), self.context())?;
        require_context("B", b.context(), self.context())?;
        let c: &Window<bf16> = c;
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
        // and dropping them waits for the stream; what a graph needs is the caller's. The workspace has the sizes for the shape, its flags were 0 when it was made, and
        // launches on one stream follow each other. Grids are equal where shapes are. Ranks that launch other shapes or windows get
        // wrong sums or wait for ever, as in every collective, but stay within the windows: every index is below what was checked
        // here, and a `GemmOutput` is as long in all ranks, as the workspace is.
        unsafe {
            match self.form {
                GemmForm::Wgmma => {
                    let map = |address, rows, tile_rows| {
                        let tiling = TensorMapDesc { address, rows, columns: k, tile_rows };
                        self.context().tensor_map(&tiling)
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

/// C: a window that has the same length in every rank, as the kernel needs that stores to all of them.
pub struct GemmOutput(Window<bf16>);

impl GemmOutput {
    /// Allocates `len` elements, zeroed, and registers them with every rank. *Collective*, with the same length on every rank of `comm`, which is
    /// all of `rank`'s world.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] on every rank where the lengths differ; as [`Communicator::window`].
    pub fn new(rank: &Rank, comm: &Communicator, len: usize) -> Result<Self> {
        let mine = require_world(rank, comm);
        let told = if mine.is_ok() { len as u64 } else { u64::MAX };
        let all = rank.all_gather(&[told])?;
        mine?;
        if let Some(other) = all.iter().position(|other| *other != [told]) {
            return refuse(format!("C has {len} elements here, but rank {other} asks for others"));
        }
        comm.window(len).map(Self)
    }
}

impl Deref for GemmOutput {
    type Target = Window<bf16>;

    fn deref(&self) -> &Window<bf16> {
        &self.0
    }
}

impl std::fmt::Debug for GemmOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmOutput({} elements)", self.len())
    }
}

/// What a rank wants and can do. One that refuses tells the others nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct Wishes {
    form: u64,
    m: u64,
    n: u64,
    /// Blocks of Hopper's form and of the portable one that run at once; 0 of a form that is not
    /// asked for, or does not run here.
    blocks: [u32; 2],
}

/// How a form is told to the other ranks; no form is any.
fn code(form: Option<GemmForm>) -> u64 {
    form.map_or(0, |form| 1 + form as u64)
}

/// The form and the blocks that all ranks take: Hopper's where all have it and none asks for another, and as many blocks as the smallest GPU
/// holds.
fn agree(all: &[Vec<Wishes>]) -> Result<(GemmForm, u32)> {
    let first = all.first().and_then(|wishes| wishes.first());
    let (mut form, mut least) = (GemmForm::Wgmma, [u32::MAX; 2]);
    for (rank, wishes) in all.iter().enumerate() {
        let [wishes] = wishes[..] else {
            return refuse(format!("rank {rank} cannot take part: its own error says why"));
        };
        if first.is_some_and(|f| (f.form, f.m, f.n) != (wishes.form, wishes.m, wishes.n)) {
            return refuse(format!(
                "rank {rank} asks for another form or other sizes than rank 0: all ask for the same"
            ));
        }
        least = [0, 1].map(|i| least[i].min(wishes.blocks[i]));
    }
    let asked = first.map_or(code(None), |wishes| wishes.form);
    if asked == code(Some(GemmForm::Mma)) || asked == code(None) && least[0] == 0 {
        form = GemmForm::Mma;
    }
    Ok((form, if form == GemmForm::Wgmma { least[0] } else { least[1] }))
}

fn wishes(
    rank: &Rank,
    comm: &Communicator,
    compiled: &Kernels,
    stream: &Stream,
    form: Option<GemmForm>,
    m: usize,
    n: usize,
) -> Result<Wishes> {
    comm.require_single_lsa_team()?;
    require_world(rank, comm)?;
    require_context("the stream", stream.context(), comm.context())?;
    require_context("the set of kernels", compiled.context(), comm.context())?;
    if m == 0 || n == 0 {
        return refuse(format!("a product of {m} x {n} elements has none"));
    }
    let hopper = compiled.info(kernels::gemm_allreduce_wgmma).is_ok();
    let wgmma = match form {
        Some(GemmForm::Mma) => 0,
        None if !hopper => 0,
        _ => resident(compiled, kernels::gemm_allreduce_wgmma, GemmForm::Wgmma)?,
    };
    let mma = match form {
        Some(GemmForm::Wgmma) => 0,
        _ => resident(compiled, kernels::gemm_allreduce_mma, GemmForm::Mma)?,
    };
    Ok(Wishes { form: code(form), m: m as u64, n: n as u64, blocks: [wgmma, mma] })
}

fn require_world(rank: &Rank, comm: &Communicator) -> Result<()> {
    let (n_ranks, all) = (comm.n_ranks(), rank.n_ranks());
    if n_ranks != all {
        return refuse(format!("a communicator of {n_ranks} ranks, but the world has {all}"));
    }
    Ok(())
}

fn require_context(what: &str, context: &Context, own: &Context) -> Result<()> {
    if !context.is(own) {
        return refuse(format!("{what} is of another context than the communicator"));
    }
    Ok(())
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
    fn ranks_agree_on_what_all_can_do_or_say_who_differs() {
        let wishes = |form, n, blocks| vec![Wishes { form: code(form), m: 7, n, blocks }];
        let hopper = wishes(None, 9, [132, 264]);
        let other = wishes(None, 9, [0, 100]);
        assert_eq!(agree(&[hopper.clone(), hopper.clone()]).unwrap(), (GemmForm::Wgmma, 132));
        assert_eq!(agree(&[hopper.clone(), other]).unwrap(), (GemmForm::Mma, 100));
        let mma = wishes(Some(GemmForm::Mma), 9, [0, 264]);
        assert_eq!(agree(&[mma.clone(), mma.clone()]).unwrap(), (GemmForm::Mma, 264));
        assert!(message(agree(&[hopper.clone(), mma])).contains("rank 1 asks for another form"));
        let larger = wishes(None, 10, [132, 264]);
        assert!(message(agree(&[hopper.clone(), larger])).contains("rank 1 asks"));
        assert!(message(agree(&[vec![], hopper])).contains("rank 0 cannot take part"));
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
