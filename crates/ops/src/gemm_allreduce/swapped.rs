//! The fused product of few rows on Hopper GPUs: its workspace and launches.

use std::collections::HashMap;

use devcomm_host::{Communicator, Context, Kernels, LaunchConfig, Result, Stream};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_swapped::{self as shapes, Cluster, Division, Shape};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_swapped::slots;
use devcomm_types::Kernel;
use half::bf16;

use super::messages::Messages;
use crate::KERNELS;
use crate::check::refuse;
use crate::gemm::{self, Matrices, Room, clusters, division_args, map};

/// The most rows of C.
pub(super) const MOST_ROWS: usize = 256;

/// Rows and columns of a tile, and the blocks that share it.
pub(super) type Tile = (u32, u32, Cluster);

/// The kernels, and the memory of their messages.
pub(super) struct Swapped {
    compiled: Kernels,
    messages: Messages,
    /// For each tile, the clusters that are resident on all GPUs, and the dynamic shared memory
    /// that a block may have.
    resident: HashMap<Tile, [u32; 2]>,
    ranks: usize,
}

impl Swapped {
    /// With slots for products of up to `m x n` elements. *Collective*.
    pub(super) fn new(comm: &Communicator, m: usize, n: usize) -> Result<Self> {
        let ranks = comm.n_ranks();
        let own = || {
            let set = KERNELS.only(&[kernels::gemm_allreduce_swapped::<shapes::M8N64, 2>::FILE]);
            let compiled = Kernels::load(comm.context(), &set)?;
            let Some(capacity) = slots(m.min(MOST_ROWS), n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let resident = |(_, _, cluster): Tile, form: &Form| {
                (form.resident)(&compiled, comm.context(), ranks, cluster.blocks())
            };
            let own = tiles().map(|(tile, form)| resident(tile, form)).collect::<Result<_>>()?;
            Ok(((compiled, capacity), own))
        };
        let own: Result<(_, Vec<[u32; 2]>)> = own();
        const NAME: &str = "GemmAllReduce: the plan swapped";
        comm.together(NAME, || {
            let call = comm.collective(NAME).option("m", m).option("n", n);
            let ((compiled, capacity), all) = call.exchange(own)?;
            // The same grids in all ranks.
            let least = |i: usize, which: usize| all.iter().map(|own| own[i][which]).min();
            let fewest = |i| [0, 1].map(|which| least(i, which).unwrap_or(0));
            let resident = tiles().enumerate().map(|(i, (tile, _))| (tile, fewest(i))).collect();
            let messages = Messages::new(comm, capacity, 0)?;
            Ok(Self { compiled, messages, resident, ranks })
        })
    }

    /// The clusters that are resident on all GPUs.
    pub(super) fn room(&self) -> Room {
        Room([1, 2, 4, 8].map(|splits| {
            let cluster = Cluster { splits, across: 1, down: 1 };
            self.resident.get(&(128, 128, cluster)).map_or(0, |[clusters, _]| *clusters)
        }))
    }

    /// How a product is divided by a plan; `None` if it cannot do it.
    fn division(&self, tile: Tile, [m, n, k]: [usize; 3]) -> Option<(Division, LaunchConfig)> {
        let fits = slots(m, n).is_some_and(|slots| slots <= self.messages.capacity);
        let [clusters, shared] = *self.resident.get(&tile)?;
        let form = form(tile).ok().filter(|_| fits && is_for([m, n, k]))?;
        let shape = [m, n, k].map(|extent| extent as u32);
        let (division, clusters, shared) = (form.divide)(shape, tile.2, 1, clusters, shared)?;
        let blocks = tile.2.blocks();
        let config = LaunchConfig::new(clusters * blocks, form.threads)
            .with_dynamic_shared(shared)
            .with_cluster(blocks)
            .with_dependent();
        Some((division, config.without_cooperation()))
    }

    /// Whether a plan does a product.
    pub(super) fn supports(&self, tile: Tile, shape: [usize; 3]) -> bool {
        self.division(tile, shape).is_some()
    }

    /// Enqueues a product. `constant_b`: see [`Division::constant_b`].
    ///
    /// # Safety
    ///
    /// The matrices begin at multiples of 16 bytes, have the elements of the shape, which the plan
    /// [supports](Self::supports), and stay allocated until the product has ended. Launches are
    /// ordered, and the same in all ranks.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        tile: Tile,
        matrices: Matrices,
        constant_b: bool,
    ) -> Result<()> {
        let shape = matrices.shape.map(|extent| extent as usize);
        let Some((division, config)) = self.division(tile, shape) else {
            return refuse(format!("the plan does no product of {shape:?}"));
        };
        let division = Division { constant_b, ..division };
        // SAFETY: the caller's contract.
        unsafe { (form(tile)?.launch)(self, stream, matrices, division, config) }
    }
}

/// Whether products of this shape have few rows, and rows of C begin at multiples of 16 bytes.
pub(super) fn is_for([m, n, _]: [usize; 3]) -> bool {
    m <= MOST_ROWS && n.is_multiple_of(8)
}

/// Whether there is a kernel with these tiles.
pub(super) fn has(rows: u32, columns: u32) -> bool {
    FORMS.iter().any(|form| form.tile == (rows, columns))
}

/// All tiles, each with its kernel.
fn tiles() -> impl Iterator<Item = (Tile, &'static Form)> {
    FORMS.iter().flat_map(|form| {
        let (rows, columns) = form.tile;
        clusters(form.tile).map(move |cluster| ((rows, columns, cluster), form))
    })
}

/// Refuses a tile that no kernel has.
pub(super) fn require(tile: Tile) -> Result<()> {
    form(tile).map(drop)
}

fn form((rows, columns, _): Tile) -> Result<&'static Form> {
    match FORMS.iter().find(|form| form.tile == (rows, columns)) {
        Some(form) => Ok(form),
        None => refuse(format!("no kernel exchanges tiles of {rows} x {columns}")),
    }
}

/// [`Division::of`].
type Divide = fn([u32; 3], Cluster, u32, u32, u32) -> Option<(Division, u32, u32)>;

/// The kernels of a shape of tiles.
struct Form {
    tile: (u32, u32),
    threads: u32,
    /// The clusters that are resident, and the dynamic shared memory of a block.
    resident: fn(&Kernels, &Context, usize, u32) -> Result<[u32; 2]>,
    divide: Divide,
    launch: unsafe fn(&Swapped, &Stream, Matrices, Division, LaunchConfig) -> Result<()>,
}

macro_rules! forms {
    ($($shape:ident)*) => {
        static FORMS: [Form; [$(stringify!($shape)),*].len()] = [$({
            type Tiles = shapes::$shape;
            type OfTwo = kernels::gemm_allreduce_swapped<Tiles, 2>;
            type OfMany = kernels::gemm_allreduce_swapped<Tiles, 0>;

            fn resident(
                compiled: &Kernels,
                context: &Context,
                ranks: usize,
                blocks: u32,
            ) -> Result<[u32; 2]> {
                match ranks {
                    2 => gemm::resident::<Tiles, OfTwo>(compiled, context, blocks),
                    _ => gemm::resident::<Tiles, OfMany>(compiled, context, blocks),
                }
            }

            /// # Safety
            ///
            /// As [`Swapped::launch`].
            unsafe fn launch(
                swapped: &Swapped,
                stream: &Stream,
                Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
                division: Division,
                config: LaunchConfig,
            ) -> Result<()> {
                let Division { across, down, .. } = division;
                let a = map::<bf16>(stream, a, [m, k, Tiles::M / across])?;
                let b = map::<bf16>(stream, b, [n, k, Tiles::N / down])?;
                let c = map::<bf16>(stream, c, [m, n, shapes::STORE_M])?;
                let division = division_args(division);
                let Messages { dev_comm, slots, state, capacity } = &swapped.messages;
                let (target, capacity) = (swapped.compiled.on(stream), *capacity);
                // SAFETY: the caller's contract; the workspace is as the kernels need it.
                unsafe {
                    if swapped.ranks == 2 {
                        let product = OfTwo::args(
                            dev_comm, a, b, c, slots, state, capacity, m, n, k, division,
                        );
                        return product.config(config).launch(&target);
                    }
                    let product = OfMany::args(
                        dev_comm, a, b, c, slots, state, capacity, m, n, k, division,
                    );
                    product.config(config).launch(&target)
                }
            }

            Form {
                tile: (Tiles::M, Tiles::N),
                threads: Tiles::THREADS,
                resident,
                divide: Division::of::<Tiles>,
                launch,
            }
        }),*];
    };
}

forms! {
    M8N64 M16N64 M32N64 M64N64 M96N64 M128N64 M8N128 M16N128 M32N128 M48N128 M64N128 M80N128
    M128N128
}
