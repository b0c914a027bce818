//! A matrix product and the reduce-scatter of its rows: its workspace and launches, with checks.

use std::cell::OnceCell;
use std::fmt;

use devcomm_host::{
    Buffer, Communicator, DeviceSlice, Kernels, LaunchConfig, ReduceOp, Result, Stream,
    StreamOrder, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_N};
use devcomm_kernels::gemm_allreduce::gemm_reduce_scatter_wide::{ROWS, slots};
use devcomm_types::Kernel;
use half::bf16;

use crate::agree::is_single_lsa_team;
use crate::check::{
    are_aligned, check_extents, refuse, require_aligned, require_context, rows_of_each,
};
use crate::chosen::Chosen;
use crate::gemm::{Matrices, address, wide_maps};
use crate::gemm_allreduce::{Messages, OFTEN, times_filled};
use crate::plan::plan_text;
use crate::timing::Together;
use crate::{Collectives, Explanation, Gemm, KERNELS};

type OfTwo = kernels::gemm_reduce_scatter_wide<2>;
type OfFour = kernels::gemm_reduce_scatter_wide<4>;
type OfEight = kernels::gemm_reduce_scatter_wide<8>;

/// Numbers of ranks that have a kernel.
const RANKS: [usize; 3] = [2, 4, 8];

/// How [`GemmReduceScatter`] does a product. As text: `unfused`, `wide`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmReduceScatterPlan {
    /// By [`Gemm`], and then [`Collectives::reduce_scatter`].
    Unfused,
    /// In one kernel, on 2, 4 or 8 Hopper GPUs, for large matrices: a rank takes turns with all
    /// ranks' rows, sends tiles while it multiplies, and adds what it receives.
    Wide,
}

plan_text!(GemmReduceScatterPlan "unfused or wide": Unfused "unfused" Wide "wide");

/// This rank's rows of the sum over the ranks of `A x B^T`, on one communicator and one stream:
/// owns the kernels and their workspace, and launches them.
///
/// Each rank has `m x k` elements of A and `n x k` of B in bf16, row-major: its slice of the
/// dimension that is summed over. Rank `r` gets the `r`-th of as many equal parts of the `m` rows
/// as there are ranks, `m / ranks x n` elements. Every rank's product, with sums in f32, is rounded
/// to bf16, and so is the sum of the products, in f32.
///
/// On 2, 4 or 8 Hopper GPUs products whose tiles fill the GPU more than once exchange them in the
/// product's kernel; others are followed by a reduce-scatter, as all are elsewhere.
/// [`explain`](Self::explain) says which plan a shape gets; [`set_plan`](Self::set_plan) selects
/// another one, and [`measure`](Self::measure) the fastest.
pub struct GemmReduceScatter {
    gemm: Gemm,
    collectives: Collectives,
    stream: Stream,
    order: StreamOrder,
    communicator: Communicator,
    product: Window<bf16>,
    /// The largest product, `m x n`.
    most: [usize; 2],
    /// Whether there is a kernel for these ranks.
    exchanges: bool,
    chosen: Chosen<GemmReduceScatterPlan>,
    wide: OnceCell<Wide>,
}

/// The kernel, and the memory of its messages.
struct Wide {
    compiled: Kernels,
    messages: Messages,
    blocks: u32,
    ranks: usize,
}

/// The call that all ranks make together.
const NAME: &str = "GemmReduceScatter::new";

impl GemmReduceScatter {
    /// For products of up to `m x n` elements, launched on `stream`. *Collective*, with the same
    /// `m` and `n` on every rank. The workspace takes `2 * m * n` bytes on each GPU, and for
    /// [`Wide`](GemmReduceScatterPlan::Wide) as many again, of more than two ranks twice as many.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a product without elements or
    /// one that is too large, and for a stream of another context; those of [`Gemm::new`] and
    /// [`Collectives::new`].
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        comm.together(NAME, || Self::new_on_all(comm, stream, [m, n]))
    }

    fn new_on_all(comm: &Communicator, stream: &Stream, [m, n]: [usize; 2]) -> Result<Self> {
        let own = || {
            require_context("the stream", stream.context(), comm.context())?;
            check_extents([m, n, 1])?;
            let Some(elements) = m.checked_mul(n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let gemm = Gemm::new(stream)?;
            let exchanges = gemm.is_hopper() && is_single_lsa_team(comm)?;
            Ok(((gemm, elements), u8::from(exchanges)))
        };
        let call = comm.collective(NAME).option("m", m).option("n", n);
        let ((gemm, elements), all) = call.agree(own())?;
        let exchanges = all.iter().all(|can| *can == 1) && RANKS.contains(&comm.n_ranks());
        let operation = Self {
            gemm,
            collectives: Collectives::new(comm)?,
            stream: stream.clone(),
            order: StreamOrder::concurrent(comm.context(), 1)?,
            communicator: comm.clone(),
            product: comm.window(elements)?,
            most: [m, n],
            exchanges,
            chosen: Chosen::default(),
            wide: OnceCell::new(),
        };
        if exchanges && operation.fills([m, n]) {
            operation.prepare_wide()?;
        }
        Ok(operation)
    }

    /// How a product of `[m, n, k]` would be done, and why.
    #[must_use]
    pub fn explain(&self, shape: [usize; 3]) -> Explanation<GemmReduceScatterPlan> {
        use GemmReduceScatterPlan::{Unfused, Wide};
        let [m, n, k] = shape;
        let (plan, reason) = match self.chosen.of(shape).next() {
            Some((Unfused, reason)) => (Unfused, reason),
            _ if self.wide.get().is_none() => (Unfused, "as no kernel was prepared"),
            _ if !m.is_multiple_of(self.rows()) || !(n | k).is_multiple_of(8) => {
                (Unfused, "as m is no multiple of 256 for each rank, or n or k none of 8")
            }
            Some((Wide, reason)) => (Wide, reason),
            None if self.fills([m, n]) => (Wide, "as it has many tiles"),
            None => (Unfused, "as it has few tiles"),
        };
        Explanation { plan, reason }
    }

    /// What `m` is a multiple of in the kernel.
    fn rows(&self) -> usize {
        self.communicator.n_ranks() * ROWS as usize
    }

    /// Whether tiles of a product of this size fill the GPU [`OFTEN`], and a rank has more
    /// than one row of them.
    fn fills(&self, size: [usize; 2]) -> bool {
        let multiprocessors = self.communicator.context().limits().multiprocessors;
        size[0] > self.rows() && times_filled(size, multiprocessors) > OFTEN
    }

    /// *Collective*.
    fn prepare_wide(&self) -> Result<()> {
        if self.wide.get().is_none() {
            let _ = self.wide.set(Wide::new(&self.communicator, self.most)?);
        }
        Ok(())
    }

    /// Does all products that this plan can do by it, or by the plan of their shape again. Every
    /// rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that [`Wide`](GemmReduceScatterPlan::Wide) is needed, it allocates
    /// `2 * m * n` bytes for the largest product, of more than two ranks `4 * m * n`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for other numbers of ranks;
    /// [`DevCommError::SeveralLsaTeams`](devcomm_host::DevCommError::SeveralLsaTeams) where load
    /// and store do not reach all ranks;
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for other GPUs; those of
    /// loading kernels and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<GemmReduceScatterPlan>) -> Result<()> {
        if plan == Some(GemmReduceScatterPlan::Wide) {
            self.prepare_wide()?;
        }
        self.chosen.set(plan);
        Ok(())
    }

    /// Times the plans of a shape, and does products of it by the fastest from now on, unless one
    /// is set: as [`GemmAllReduce::measure`](crate::GemmAllReduce::measure). The product of
    /// [`Unfused`](GemmReduceScatterPlan::Unfused) is timed with its likely plans. All ranks get
    /// the same plan. *Collective*.
    ///
    /// It allocates the workspaces of both plans, which this object keeps.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have different
    /// shapes.
    pub fn measure<A, B, C>(
        &self,
        a: &A,
        b: &B,
        c: &C,
        shape: [usize; 3],
    ) -> Result<GemmReduceScatterPlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let comm = &self.communicator;
        let measure = || {
            let own = || {
                comm.context().refuse_capturing("GemmReduceScatter::measure is called")?;
                let buffers = [&a.device_slice(), &b.device_slice(), &c.device_slice()];
                Ok((self.matrices(buffers, shape)?.0, ()))
            };
            let call = comm.collective("GemmReduceScatter::measure");
            let (addresses, _) = call.option("shape", format!("{shape:?}")).agree(own())?;
            let plans = [GemmReduceScatterPlan::Unfused, GemmReduceScatterPlan::Wide];
            let plans = &plans[..1 + usize::from(self.exchanges)];
            let gemm = Some(&self.gemm);
            Together { comm, stream: &self.stream, gemm, shape }.fastest(
                (plans, GemmReduceScatterPlan::Unfused, self.explain(shape).plan),
                |plan| self.set_plan(Some(plan)),
                |plan| {
                    let is_unfused = plan == GemmReduceScatterPlan::Unfused;
                    self.explain(shape).plan == plan && (is_unfused || are_aligned(addresses))
                },
                || self.launch(a, b, c, shape),
            )
        };
        self.chosen.find(shape, measure)
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// writes this rank's `m / ranks * n` sums to `c`. Every rank calls it with the same shape, in
    /// the same order. Only work on this stream may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, `m`
    /// that is no multiple of the number of ranks, buffers that are too short or of another
    /// context, or a product that is too large for this workspace; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        let (addresses, extents) = self.matrices([&a, &b, &c], shape)?;
        let [m, n, _] = shape;
        let _turn = self.order.begin(&self.stream)?;
        // SAFETY: the buffers have the elements; memory that is dropped is freed after the work of
        // the streams, and after the graphs. `order` lets launches follow each other.
        unsafe {
            if let (GemmReduceScatterPlan::Wide, Some(wide)) =
                (self.explain(shape).plan, self.wide.get())
            {
                require_aligned("wide", addresses)?;
                return wide.launch(&self.stream, addresses, &self.product, extents);
            }
            let product = self.product.slice(..m * n)?;
            self.gemm.launch(&a, &b, &product, shape)?;
            let c = c.slice(..m / self.communicator.n_ranks() * n)?;
            self.collectives.reduce_scatter(&product, &c, ReduceOp::Sum, &self.stream)
        }
    }

    /// The addresses and the shape, checked.
    fn matrices(
        &self,
        [a, b, c]: [&DeviceSlice<bf16>; 3],
        shape @ [m, n, k]: [usize; 3],
    ) -> Result<([u64; 3], [u32; 3])> {
        let extents = check_extents(shape)?;
        let rows = rows_of_each(m, self.communicator.n_ranks())?;
        if m * n > self.product.len() {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmReduceScatter for it"
            ));
        }
        let context = self.communicator.context();
        let addresses = [
            address(context, "A", a, m, k)?,
            address(context, "B", b, n, k)?,
            address(context, "C", c, rows, n)?,
        ];
        Ok((addresses, extents))
    }
}

impl Wide {
    /// With slots for a rank's share of a product of up to `m x n` elements. *Collective*.
    fn new(comm: &Communicator, [m, n]: [usize; 2]) -> Result<Self> {
        let ranks = comm.n_ranks();
        let own = || {
            if !RANKS.contains(&ranks) {
                return refuse(format!("the plan `wide` is for 2, 4 or 8 ranks, not {ranks}"));
            }
            comm.require_single_lsa_team()?;
            let set = KERNELS.only(&[OfTwo::FILE]);
            let compiled = Kernels::load(comm.context(), &set)?;
            let blocks = match ranks {
                2 => compiled.resident_blocks::<OfTwo>(THREADS, SHARED)?,
                4 => compiled.resident_blocks::<OfFour>(THREADS, SHARED)?,
                _ => compiled.resident_blocks::<OfEight>(THREADS, SHARED)?,
            };
            let Some(capacity) = slots(m.div_ceil(ranks), n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            Ok(((compiled, capacity), blocks))
        };
        const NAME: &str = "GemmReduceScatter: the plan wide";
        comm.together(NAME, || {
            let call = comm.collective(NAME).option("m", m).option("n", n);
            let ((compiled, capacity), blocks) = call.agree(own())?;
            // The same grid in all ranks.
            let blocks = blocks.into_iter().min().unwrap_or(0);
            Ok(Self { compiled, messages: Messages::new(comm, capacity, 0)?, blocks, ranks })
        })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    ///
    /// The matrices begin at multiples of 16 bytes, and have the elements of the shape, which the
    /// kernel supports, for C this rank's; `product` has all. All stay allocated until the kernel
    /// has ended. Launches are ordered, and the same in all ranks.
    unsafe fn launch(
        &self,
        stream: &Stream,
        [a, b, c]: [u64; 3],
        product: &Window<bf16>,
        [m, n, k]: [u32; 3],
    ) -> Result<()> {
        let product = product.device_address();
        let matrices = Matrices::plain([a, b, product], [m, n, k]);
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(stream, matrices)?;
        // A cluster computes as many tiles of each rank's rows.
        let tiles = u64::from(m / (self.ranks as u32 * ROWS)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(self.blocks / CLUSTER).min(tiles) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let config = config.with_dependent().without_cooperation();
        let Messages { dev_comm, slots, state, capacity } = &self.messages;
        let (target, capacity) = (self.compiled.on(stream), *capacity);
        // SAFETY: the caller's contract; the workspace is as the kernels need it.
        unsafe {
            if self.ranks == 2 {
                let launch =
                    OfTwo::args(dev_comm, a, b, map, product, c, slots, state, capacity, m, n, k);
                return launch.config(config).launch(&target);
            }
            if self.ranks == 4 {
                let launch =
                    OfFour::args(dev_comm, a, b, map, product, c, slots, state, capacity, m, n, k);
                return launch.config(config).launch(&target);
            }
            let launch =
                OfEight::args(dev_comm, a, b, map, product, c, slots, state, capacity, m, n, k);
            launch.config(config).launch(&target)
        }
    }
}

impl fmt::Debug for GemmReduceScatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GemmReduceScatter({} ranks)", self.communicator.n_ranks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read_as_they_are_written() {
        for text in ["unfused", "wide"] {
            assert_eq!(text.parse::<GemmReduceScatterPlan>().unwrap().to_string(), text);
        }
        let error = "ring".parse::<GemmReduceScatterPlan>().unwrap_err().to_string();
        assert_eq!(error, "`ring` is no plan: unfused or wide");
    }
}
