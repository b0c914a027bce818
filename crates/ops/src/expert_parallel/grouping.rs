//! The rows that a rank has received, in the order of its experts.

use devcomm_host::{Buffer, DeviceSlice, LaunchConfig, Result, Stream, SymmetricBuffer};
use devcomm_kernels as kernels;
use devcomm_kernels::expert_parallel::SCALED;
use devcomm_kernels::expert_parallel::ep_layout::GroupedArgs;
use devcomm_kernels::expert_parallel::shape::ReceivedArgs;
use devcomm_types::{Element, F8E4M3};
use half::bf16;

use super::form::{Arrivals, RowsInOrder};
use super::{ExpertParallel, MANY_THREADS, Stage, THREADS, shape_args};
use crate::RowGroups;
use crate::check::{address, refuse, refuse_if};
use crate::launch::LaunchWith;

const F8_ROWS: &str = "the tokens are 8-bit floats with scales: `group_f8`, `rows_f8`";
const NO_F8_ROWS: &str = "the tokens are no 8-bit floats: `group`, `rows`";

impl ExpertParallel {
    /// Returns the most rows in the order of a rank's experts: one for each expert of each token,
    /// as if all ranks had the most tokens and this rank all their experts, and those that
    /// alignment leaves free; or the limit of
    /// [`ExpertParallelOptions::throughput`](super::ExpertParallelOptions::throughput), if less.
    #[must_use]
    pub fn most_rows(&self) -> usize {
        self.options.most_rows(self.communicator.n_ranks())
    }

    /// Returns where rows arrive in the form for high throughput, in the order of this rank's
    /// experts, with room for [`most_rows`](Self::most_rows). Of a token with several experts here
    /// one row arrives, at the first of its places; [`group`](Self::group) into this memory copies
    /// it to the others, and does nothing else with rows. The next dispatch overwrites them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) in the other forms, and for
    /// tokens that arrive as 8-bit floats.
    pub fn rows(&self) -> Result<DeviceSlice<bf16>> {
        match self.form.arrivals()? {
            Arrivals::Bf16(rows) => Ok(rows.device_slice()),
            Arrivals::F8(_) => refuse(F8_ROWS),
        }
    }

    /// Returns [`rows`](Self::rows) of 8-bit floats, for [`group_f8`](Self::group_f8).
    ///
    /// # Errors
    ///
    /// As [`rows`](Self::rows), but for tokens of bf16.
    pub fn rows_f8(&self) -> Result<DeviceSlice<F8E4M3>> {
        match self.form.arrivals()? {
            Arrivals::Bf16(_) => refuse(NO_F8_ROWS),
            Arrivals::F8(rows) => Ok(rows.device_slice()),
        }
    }

    /// Returns the index of the first row of each expert of this rank, and the index after the last
    /// row. [`group`](Self::group) writes them.
    #[must_use]
    pub fn offsets(&self) -> DeviceSlice<u32> {
        self.offsets.device_slice()
    }

    /// Returns the number of rows of each expert of this rank. [`group`](Self::group) writes it.
    #[must_use]
    pub fn sizes(&self) -> DeviceSlice<u32> {
        self.sizes.device_slice()
    }

    /// Returns which rows each expert has, for a [`GroupedGemm`](crate::GroupedGemm).
    /// [`group`](Self::group) writes them.
    #[must_use]
    pub fn groups(&self) -> RowGroups {
        RowGroups { offsets: self.offsets(), sizes: self.sizes() }
    }

    /// Returns for each row in the order of the experts its token: the rank times the most tokens
    /// of a rank, plus the number of the token there. [`group`](Self::group) writes them.
    #[must_use]
    pub fn origins(&self) -> DeviceSlice<u32> {
        self.origins.device_slice()
    }

    /// Puts what was received in the order of this rank's experts: `rows` gets a row for each token
    /// and expert, those of an expert in the order of the ranks and tokens. Fewer than
    /// [`most_rows`](Self::most_rows) are enough if the routing is known to be even; rows for which
    /// there is no room are left out, and reported by [`check`](Self::check).
    ///
    /// In the form for high throughput `rows` has room for [`most_rows`](Self::most_rows), and may
    /// be those of [`rows`](Self::rows).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) if nothing was received, for rows
    /// that are not aligned to 16 bytes or of another context, and for tokens that arrive as 8-bit
    /// floats; those of the launch.
    pub fn group<R>(&self, rows: &R, stream: &Stream) -> Result<()>
    where
        R: Buffer<Element = bf16>,
    {
        refuse_if!(self.options.f8, "{F8_ROWS}");
        let rows = rows.device_slice();
        self.enqueue_group(&rows, None, stream)
    }

    /// Does what [`group`](Self::group) does, for tokens that arrive as 8-bit floats
    /// ([`f8`](super::ExpertParallelOptions::f8)). `scales` gets their scales, in the form of
    /// [`Product::block_scales`](crate::Product::block_scales): a row-major matrix with a row for
    /// each 128 elements, and a column for each row that there is room for. Those are as many as
    /// `rows` holds, but not more than [`most_rows`](Self::most_rows).
    ///
    /// # Errors
    ///
    /// As [`group`](Self::group), but for tokens of bf16, and for too few scales.
    pub fn group_f8<R, S>(&self, rows: &R, scales: &S, stream: &Stream) -> Result<()>
    where
        R: Buffer<Element = F8E4M3>,
        S: Buffer<Element = f32>,
    {
        refuse_if!(!self.options.f8, "{NO_F8_ROWS}");
        let (rows, scales) = (rows.device_slice(), scales.device_slice());
        self.enqueue_group(&rows, Some(&scales), stream)
    }

    fn enqueue_group<T: Element>(
        &self,
        rows: &DeviceSlice<T>,
        scales: Option<&DeviceSlice<f32>>,
        stream: &Stream,
    ) -> Result<()> {
        self.end_flight()?;
        refuse_if!(
            self.stage.get() == Stage::Begin,
            "no tokens have been received: `dispatch` does that"
        );
        let (hidden, most) = (self.options.hidden, self.most_rows());
        let capacity = match self.options.rows {
            // High throughput: rows have their places already.
            Some(_) => most,
            None => (rows.len() / hidden).min(most),
        };
        let scales = scales.map_or(Ok(0), |scales| {
            let context = self.communicator.context();
            address(context, "the scales of the rows", scales, capacity, hidden / SCALED)
        })?;
        let rows = self.check_rows("the rows of the experts", rows, capacity)?;
        let _turn = self.begin(stream)?;
        let rows = RowsInOrder { rows, scales, capacity: capacity as u32 };
        self.form.group(self, rows, stream)?;
        self.stage.set(Stage::Grouped);
        self.grouped.set(capacity);
        Ok(())
    }

    /// Returns an estimate of the tokens of all ranks, as if each had the number of this rank: it
    /// chooses the grid of kernels that work with any.
    pub(super) fn expected_tokens(&self) -> u32 {
        let ranks = self.communicator.n_ranks() as u32;
        (self.tokens.get().max(1) as u32).saturating_mul(ranks)
    }

    /// Returns the memory of rows in the order of the experts as an argument. `returns` is the
    /// address of [`Grouped::returns`](kernels::expert_parallel::ep_layout::Grouped::returns), or 0
    /// in the form for high throughput, whose kernels have these words in `Counted`.
    pub(super) fn grouped_args(&self, rows: RowsInOrder, returns: u64) -> GroupedRows<'_> {
        let RowsInOrder { rows, scales, capacity } = rows;
        let (offsets, sizes, origins) = (&self.offsets, &self.sizes, &self.origins);
        let alignment = self.options.alignment as u32;
        GroupedArgs { rows, scales, capacity, alignment, offsets, sizes, origins, returns }
    }

    /// Puts rows that arrive in the order of ranks and tokens in that of the experts.
    pub(super) fn lay_out(
        &self,
        received: ReceivedArgs<u64, u64, u64, u64, u64, u64, u64>,
        returns: &SymmetricBuffer<u32>,
        rows: RowsInOrder,
        stream: &Stream,
    ) -> Result<()> {
        let (sizes, ranks) = (shape_args(self.sent), self.communicator.n_ranks() as u32);
        let groups = self.grouped_args(rows, returns.device_address());
        let args = (sizes, ranks, received, groups, &self.faults);
        let tokens = self.expected_tokens();
        let blocks = tokens.min(self.options.blocks.unwrap_or(2 * self.multiprocessors()));
        // More warps if tokens are more than these blocks have warps.
        let threads = if tokens > blocks * (THREADS / 32) { MANY_THREADS } else { THREADS };
        let threads = self.options.threads.unwrap_or(threads);
        let config = LaunchConfig::new(blocks, threads).with_dependent();
        // SAFETY: `enqueue_group` has checked the buffers and orders the launch; dropping a buffer
        // waits for the stream. The form allocates the memory that the kernel needs.
        unsafe { kernels::ep_layout::launch(args, config, &self.compiled.on(stream)) }
    }
}

/// [`Grouped`](kernels::expert_parallel::ep_layout::Grouped) as an argument.
type GroupedRows<'a> = GroupedArgs<
    u64,
    u64,
    u32,
    u32,
    &'a SymmetricBuffer<u32>,
    &'a SymmetricBuffer<u32>,
    &'a SymmetricBuffer<u32>,
    u64,
>;
