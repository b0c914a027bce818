//! A struct that keeps what a kernel needs between launches.

// ANCHOR: kept
use devcomm::device::LlA2aHandle;
use devcomm::{Communicator, DevCommRequirements, DevCommResource, Error, LlA2a};
use devcomm::{Stream, SymmetricBuffer};
use kernels::numbers::softmax_of_all;

/// Softmax of rows whose columns are divided among the ranks. All ranks create one, and launch it
/// together.
pub struct Softmax {
    stream: Stream,
    dev: DevCommResource,
    exchange: LlA2aHandle,
    x: SymmetricBuffer<f32>,
    rows: u32,
    columns: u32,
}

impl Softmax {
    /// Blocks of a launch, each of which has a row at a time.
    const BLOCKS: u32 = 8;

    /// Prepares `rows` rows, with `columns` columns of each on this rank. All ranks call this
    /// together, and load [`KERNELS`](crate::KERNELS) before the first launch.
    pub fn new(
        comm: &Communicator,
        stream: &Stream,
        rows: u32,
        columns: u32,
    ) -> Result<Self, Error> {
        comm.require_single_lsa_team()?;
        let mut requirements = DevCommRequirements::new();
        let max_elements = comm.n_ranks() as u32; // from each rank two f32, which are 8 bytes
        let key = requirements.add(LlA2a { blocks: Self::BLOCKS, max_elements, element_size: 8 });
        let dev = comm.create_dev_comm(requirements)?;
        let exchange = dev.resource(key)?;
        let x = comm.mem_alloc(rows as usize * columns as usize)?;
        Ok(Self { stream: stream.clone(), dev, exchange, x, rows, columns })
    }

    /// Returns the elements of this rank, row-major.
    pub fn x(&self) -> &SymmetricBuffer<f32> {
        &self.x
    }

    /// Enqueues the softmax of [`x`](Self::x), in place.
    pub fn launch(&self) -> Result<(), Error> {
        let Self { dev, exchange, x, rows, columns, .. } = self;
        let args = softmax_of_all::args(dev, *exchange, x, *rows, *columns);
        // SAFETY: x has these elements, and the handle is for these blocks and ranks. The handle's
        // memory is used by one launch at a time, since all are in one stream.
        unsafe { args.grid(Self::BLOCKS).block(32).launch(&self.stream) }
    }
}
// ANCHOR_END: kept
