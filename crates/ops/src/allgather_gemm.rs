//! The all-gather of A's rows and a matrix product: its workspace and launches, with checks.

use std::cell::OnceCell;
use std::fmt;

use devcomm_host::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, DeviceSlice, Kernels, LaunchConfig,
    Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M, TILE_N};
use devcomm_kernels::{GatheredArgs, gather_flags};
use devcomm_types::Kernel;
use half::bf16;
use nccl_device::TileExchange;

use crate::agree::is_single_lsa_team;
use crate::check::{refuse, require_context, rows_of_each};
use crate::extents::Extents;
use crate::fused::{Base, Operands, Operation, Strategy, prepare_once, prepared};
use crate::gemm::{Activation, Added, Matrices, address, map, wide_maps};
use crate::plan::plan_text;
use crate::{Collectives, Explanation, Gemm, KERNELS};

type Plan = AllGatherGemmPlan;
/// The memory of C.
type C = DeviceSlice<bf16>;

type FusedKernel = kernels::allgather_gemm;

/// How [`AllGatherGemm`] does a product. As text: `unfused`, `fused`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllGatherGemmPlan {
    /// An all-gather by [`Collectives::all_gather`], and then [`Gemm`].
    Unfused,
    /// One kernel, on Hopper GPUs, any number of ranks: a rank multiplies its own rows while
    /// those of the others arrive.
    Fused,
}

plan_text!(AllGatherGemmPlan "unfused or fused": Unfused "unfused" Fused "fused");

/// `C = A x B^T`, where every rank has some rows of A, and its own B and C: owns the kernels and
/// their workspace, on one communicator and one stream, and launches them.
///
/// In bf16 and row-major: rank `r` has the `r`-th of as many equal parts of the `m` rows of A as
/// there are ranks, `m / ranks x k` elements, `n x k` elements of B, and gets `m x n` elements of
/// C: its columns of a layer whose weights the ranks share. Sums are in f32, and rounded once, with
/// what a [`product`](Self::product) adds to them. `n` may differ between the ranks.
///
/// On Hopper GPUs products of many rows are multiplied while rows arrive; others follow an
/// all-gather, as all do elsewhere. [`explain`](Self::explain) says which plan a shape gets;
/// [`set_plan`](Self::set_plan) selects another one, and [`measure`](Self::measure) the fastest.
pub struct AllGatherGemm {
    base: Base<Plan>,
    /// Whether there is a kernel for these ranks.
    overlaps: bool,
    unfused: Unfused,
    fused: OnceCell<Fused>,
}

/// The collective and the product of a rank, and the memory of all rows of A.
struct Unfused {
    gemm: Gemm,
    collectives: Collectives,
    gathered: Window<bf16>,
}

/// Rows from which on the fused kernel does a product by default. Not a matter of columns, of which
/// ranks may have different numbers.
const MANY_ROWS: usize = 4096;

/// The kernel, and the memory that the rows of A arrive in.
struct Fused {
    compiled: Kernels,
    dev_comm: DevCommResource,
    banks: Window<bf16>,
    flags: Window<u32>,
    state: SymmetricBuffer<u32>,
    clusters: u32,
}

/// The call that all ranks make together.
const NAME: &str = "AllGatherGemm::new";

impl AllGatherGemm {
    /// Prepares products with up to `m` rows and `m * k` elements of A, launched on `stream`.
    /// *Collective*, with the same `m` and `k` on every rank. The workspace takes `2 * m * k` bytes
    /// on each GPU, and twice as many again for [`Fused`](AllGatherGemmPlan::Fused).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for an A without elements or one
    /// that is too large, and for a stream of another context; those of [`Gemm::new`] and
    /// [`Collectives::new`].
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, k: usize) -> Result<Self> {
        comm.together(NAME, || Self::new_on_all(comm, stream, [m, k]))
    }

    fn new_on_all(comm: &Communicator, stream: &Stream, [m, k]: [usize; 2]) -> Result<Self> {
        let own = || {
            require_context("the stream", stream.context(), comm.context())?;
            Extents::new([m, 1, k])?;
            let Some(elements) = m.checked_mul(k) else {
                return refuse(format!("{m} x {k} elements of A are too many"));
            };
            let gemm = Gemm::new(stream)?;
            let overlaps = gemm.is_hopper() && is_single_lsa_team(comm)?;
            Ok(((gemm, elements), u8::from(overlaps)))
        };
        let call = comm.collective(NAME).option("m", m).option("k", k);
        let ((gemm, elements), all) = call.agree(own())?;
        let overlaps = all.len() > 1 && all.iter().all(|can| *can == 1);
        let unfused = Unfused {
            gemm,
            collectives: Collectives::new(comm)?,
            gathered: comm.window(elements)?,
        };
        let base = Base::new(comm, stream, "allgather-gemm", [m, k])?;
        let operation = Self { base, overlaps, unfused, fused: OnceCell::new() };
        if overlaps && m >= MANY_ROWS {
            operation.fused.prepare(&operation.base, AllGatherGemmPlan::Fused)?;
        }
        Ok(operation)
    }

    /// Returns how a product of `[m, n, k]` would be done, and why.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape that no product has.
    pub fn explain(&self, shape: [usize; 3]) -> Result<Explanation<AllGatherGemmPlan>> {
        Ok(self.decide(Extents::new(shape)?))
    }

    /// Does all products that this plan can do by it, or by the plan of their shape again. Every
    /// rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that [`Fused`](AllGatherGemmPlan::Fused) is needed, it allocates `4 * m * k`
    /// bytes for the largest A.
    ///
    /// # Errors
    ///
    /// [`DevCommError::SeveralLsaTeams`](devcomm_host::DevCommError::SeveralLsaTeams) where load
    /// and store do not reach all ranks;
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for other GPUs; those of
    /// loading kernels and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<AllGatherGemmPlan>) -> Result<()> {
        self.set(plan)
    }

    /// Times the plans of a shape, and does products of this `m` and `k` by the fastest from now
    /// on, unless one is set: as [`GemmAllReduce::measure`](crate::GemmAllReduce::measure). All
    /// ranks, whose `n` may differ, get the same plan. If `n` is the same, the product of
    /// [`Unfused`](AllGatherGemmPlan::Unfused) is timed with its likely plans. *Collective*.
    ///
    /// It allocates the workspaces of both plans, which this object keeps.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have another `m`
    /// or `k`.
    pub fn measure<A, B, C>(
        &self,
        a: &A,
        b: &B,
        c: &C,
        shape: [usize; 3],
    ) -> Result<AllGatherGemmPlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let ((a, b, c), [m, _, k]) =
            ((a.device_slice(), b.device_slice(), c.device_slice()), shape);
        let call = self.base.comm.collective("AllGatherGemm::measure");
        let call = call.option("m", m).option("k", k);
        self.find_fastest(call, self.operands([&a, &b, &c], None, shape))
    }

    fn operands<'a>(
        &self,
        [a, b, c]: [&'a DeviceSlice<bf16>; 3],
        added: Option<&'a Added<bf16>>,
        shape @ [m, n, k]: [usize; 3],
    ) -> Result<Operands<'a, DeviceSlice<bf16>>> {
        let extents = Extents::new(shape)?;
        let rows = rows_of_each(m, self.base.comm.n_ranks())?;
        if m > self.base.most[0] || m * k > self.unfused.gathered.len() {
            return refuse(format!(
                "{m} x {k} elements of A need a larger workspace: make another AllGatherGemm for \
                 them"
            ));
        }
        let context = self.base.context();
        let addresses = [
            address(context, "A", a, rows, k)?,
            address(context, "B", b, n, k)?,
            address(context, "C", c, m, n)?,
        ];
        Ok(Operands { a, b, c, addresses, added, extents })
    }

    /// Lets [`Unfused`](AllGatherGemmPlan::Unfused) read B before the previous kernels of the
    /// stream have ended: weights, for instance, which no kernel writes.
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(self) -> Self {
        // SAFETY: the caller's contract.
        let gemm = unsafe { self.unfused.gemm.with_constant_b() };
        Self { unfused: Unfused { gemm, ..self.unfused }, ..self }
    }

    /// Returns a product of `[m, n, k]`, as [`launch`](Self::launch) computes it until more is
    /// added.
    pub fn product(&self, shape: [usize; 3]) -> GatheredProduct<'_> {
        GatheredProduct { operation: self, shape, added: Added::NOTHING }
    }

    /// Enqueues one product of `[m, n, k]`, with nothing added to it: see
    /// [`GatheredProduct::launch`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        self.product(shape).launch(a, b, c)
    }
}

/// A product of `[m, n, k]` that [`AllGatherGemm::product`] began, with all of A: `C =
/// activation(A x B^T + bias) + residual`, of which only the product itself is always there. All is
/// computed in f32, and rounded once.
///
/// With something added it follows an all-gather ([`Unfused`](AllGatherGemmPlan::Unfused)): the
/// fused kernel has no registers left. So all ranks add something, or none does.
#[must_use = "it is launched by `launch`"]
pub struct GatheredProduct<'g> {
    operation: &'g AllGatherGemm,
    shape: [usize; 3],
    added: Added<bf16>,
}

impl GatheredProduct<'_> {
    /// Adds the first `n` elements of `bias` to each row.
    pub fn bias<D: Buffer<Element = bf16>>(mut self, bias: &D) -> Self {
        self.added.bias = Some(bias.device_slice());
        self
    }

    /// Replaces each element, after the bias, by a function of it.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.added.activation = Some(activation);
        self
    }

    /// Adds the first `m * n` elements of `residual`, row-major, after the activation. It may be C.
    pub fn residual<R: Buffer<Element = bf16>>(mut self, residual: &R) -> Self {
        self.added.residual = Some(residual.device_slice());
        self
    }

    /// Enqueues the product: reads this rank's `m / ranks * k` elements of `a` and `n * k` of `b`,
    /// and writes the first `m * n` of `c`, which overlaps no other buffer, but may begin where the
    /// residual does. Every rank calls it with the same `m` and `k`, in the same order. Only work
    /// on this stream may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, `m`
    /// that is no multiple of the number of ranks, buffers that are too short or of another
    /// context, or an A that is too large for this workspace; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        let added = Some(&self.added).filter(|added| !added.is_nothing());
        let operands = self.operation.operands([&a, &b, &c], added, self.shape)?;
        self.operation.run(&operands)
    }
}

impl Operation for AllGatherGemm {
    type Plan = Plan;
    type C = C;
    const UNFUSED: Plan = Plan::Unfused;

    fn base(&self) -> &Base<Plan> {
        &self.base
    }

    fn strategy(&self, plan: Plan) -> &dyn Strategy<Plan, C> {
        match plan {
            Plan::Unfused => &self.unfused,
            Plan::Fused => &self.fused,
        }
    }

    fn gemm(&self) -> Option<&Gemm> {
        Some(&self.unfused.gemm)
    }

    /// Ranks may have different numbers of columns.
    fn key(extents: Extents) -> Extents {
        extents.without_columns()
    }

    fn choose(&self, extents: Extents) -> Explanation<Plan> {
        let fused = Plan::Fused;
        let (plan, reason) = match self.fused.get() {
            None => (Self::UNFUSED, "as no kernel was prepared"),
            _ if !self.fused.supports(&self.base, fused, extents) => {
                (Self::UNFUSED, "as k is no multiple of 8")
            }
            _ if extents.lengths()[0] >= MANY_ROWS => (fused, "as it has many rows"),
            _ => (Self::UNFUSED, "as it has few rows"),
        };
        Explanation { plan, reason }
    }

    fn to_measure(&self, _: Extents, _: Plan) -> Result<Vec<Plan>> {
        let fused = self.overlaps.then_some(Plan::Fused);
        Ok([Self::UNFUSED].into_iter().chain(fused).collect())
    }
}

impl Strategy<Plan, C> for Unfused {
    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Self { gemm, collectives, gathered } = self;
        let Operands { a, b, c, added, extents, .. } = of;
        let [m, n, k] = extents.lengths();
        // Before the all-gather, which other ranks wait for.
        let added = added.cloned().unwrap_or(Added::NOTHING);
        added.args(on.context(), [m, n])?;
        let gathered = gathered.slice(..m * k)?;
        let own = a.slice(..m / on.comm.n_ranks() * k)?;
        collectives.all_gather(&own, &gathered, &on.stream)?;
        gemm.product_with(extents.lengths(), added).launch_of(*extents, (&gathered, b, c))
    }
}

impl fmt::Debug for GatheredProduct<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.shape;
        write!(f, "GatheredProduct({m} x {n} x {k})")
    }
}

impl Fused {
    /// Allocates two banks for up to `m x k` elements. *Collective*.
    fn new(comm: &Communicator, [m, k]: [usize; 2]) -> Result<Self> {
        /// A bank begins at a multiple of so many elements.
        const ALIGNMENT: usize = 128;
        let own = || {
            comm.require_single_lsa_team()?;
            let set = KERNELS.only(&[FusedKernel::FILE]);
            let compiled = Kernels::load(comm.context(), &set)?;
            let clusters = compiled.resident_clusters::<FusedKernel>(CLUSTER, THREADS, SHARED)?;
            if clusters == 0 {
                return refuse("the GPU has no room for a block of the kernel".to_owned());
            }
            Ok(((compiled, clusters), ()))
        };
        const NAME: &str = "AllGatherGemm: the plan fused";
        // No kernel sets a flag before those of all ranks are zeroed, as new windows are.
        comm.together(NAME, || {
            let call = comm.collective(NAME).option("m", m).option("k", k);
            let ((compiled, clusters), _) = call.agree(own())?;
            let fused = Self {
                compiled,
                dev_comm: comm.create_dev_comm(DevCommRequirements::new())?,
                banks: comm.window(2 * (m * k).next_multiple_of(ALIGNMENT))?,
                flags: comm.window(gather_flags(m, comm.n_ranks()).max(1))?,
                state: comm.mem_alloc(TileExchange::<bf16>::STATE)?,
                clusters,
            };
            fused.state.fill_bytes(0)?;
            Ok(fused)
        })
    }
}

impl Strategy<Plan, C> for OnceCell<Fused> {
    fn supports(&self, _: &Base<Plan>, _: Plan, extents: Extents) -> bool {
        let [.., k] = extents.lengths();
        self.get().is_some() && k.is_multiple_of(8)
    }

    fn prepare(&self, on: &Base<Plan>, _: Plan) -> Result<()> {
        prepare_once(self, || Fused::new(&on.comm, on.most))
    }

    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Fused { compiled, dev_comm, banks, flags, state, clusters } = prepared(self)?;
        let (stream, matrices) = (&on.stream, of.matrices());
        let Matrices { a, shape: [m, n, k], .. } = matrices;
        let rows = m / on.comm.n_ranks() as u32;
        let first = banks.device_address();
        let in_first = Matrices { a: first, ..matrices };
        let ([gathered, b, map_of_c], unaligned) = wide_maps::<bf16, bf16>(stream, in_first)?;
        let factor = |address, rows| map::<bf16>(stream, address, [rows, k, TILE_M]);
        let second = first + banks.len() as u64 / 2 * size_of::<bf16>() as u64;
        let (own, second) = (factor(a, rows)?, factor(second, m)?);
        let tiles = u64::from(m.div_ceil(CLUSTER * TILE_M)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(*clusters).min(tiles) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let memory = GatheredArgs { rows: a, banks, flags, state };
        let launch = FusedKernel::args(
            dev_comm, memory, own, gathered, second, b, map_of_c, unaligned, m, n, k,
        );
        // SAFETY: the caller's contract; the workspace is as the kernel needs it.
        unsafe { launch.config(config.with_dependent()).launch(&compiled.on(stream)) }
    }
}

impl fmt::Debug for AllGatherGemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AllGatherGemm({} ranks)", self.base.comm.n_ranks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read_as_they_are_written() {
        for text in ["unfused", "fused"] {
            assert_eq!(text.parse::<AllGatherGemmPlan>().unwrap().to_string(), text);
        }
        let error = "ring".parse::<AllGatherGemmPlan>().unwrap_err().to_string();
        assert_eq!(error, "`ring` is no plan: unfused or fused");
    }
}
