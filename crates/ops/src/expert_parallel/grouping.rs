//! The rows that a rank has received, in the order of its experts.

use devcomm_kernels::expert_parallel::ep_layout::{Grouped, GroupedArgs};
use devcomm_kernels::expert_parallel::{Received, SCALED};

use super::form::RowsInOrder;
use super::steps::{Last, Place, Stage};
use super::{ExpertParallel, MANY_THREADS, THREADS, shape_args};
use crate::RowGroups;
use crate::prelude::*;

impl ExpertParallel {
    /// Returns the most rows in the order of a rank's experts: one for each expert of each token of
    /// all ranks, and those that alignment leaves free; or the limit of
    /// [`ExpertParallelOptions::throughput`](super::ExpertParallelOptions::throughput), if less.
    #[must_use]
    pub fn most_rows(&self) -> usize {
        self.options.most_rows(self.communicator.n_ranks())
    }

    /// Returns where rows arrive in the form for high throughput, in the order of this rank's
    /// experts, with room for [`most_rows`](Self::most_rows): of bf16, or of `F8E4M3` for
    /// [`group_f8`](Self::group_f8). Of a token with several experts here one row arrives, at its
    /// first place; [`group`](Self::group) into this memory only copies it to the others.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] in the other forms, and for another type than that in which tokens
    /// arrive.
    pub fn rows<T: Element>(&self) -> Result<DeviceSlice<T>> {
        let rows = self.form.arrivals()?.device_slice();
        self.require_type::<T>()?;
        Ok(window::<T, _>("the memory of rows", &rows, &self.communicator)?.0.device_slice())
    }

    fn require_type<T: Element>(&self) -> Result<()> {
        match self.options.f8 {
            _ if T::DATA_TYPE == self.options.row_type() => Ok(()),
            true => refuse("the tokens are 8-bit floats with scales: `group_f8`, rows of `F8E4M3`"),
            false => refuse("the tokens are no 8-bit floats: `group`, rows of `bf16`"),
        }
    }

    /// Returns which rows each expert of this rank has, for a [`GroupedGemm`](crate::GroupedGemm).
    /// The offsets end with the index after the last row. [`group`](Self::group) writes them.
    #[must_use]
    pub fn groups(&self) -> RowGroups {
        RowGroups { offsets: self.offsets.device_slice(), sizes: self.sizes.device_slice() }
    }

    /// Returns for each row in the order of the experts its token: the rank times the most tokens
    /// of a rank, plus the number of the token there. [`group`](Self::group) writes them.
    #[must_use]
    pub fn origins(&self) -> DeviceSlice<u32> {
        self.origins.device_slice()
    }

    /// Puts what was received in the order of this rank's experts: `rows` gets a row for each token
    /// and expert, those of an expert in the order of the ranks and tokens. If there is room for
    /// fewer than [`most_rows`](Self::most_rows), [`check`](Self::check) reports rows that are left
    /// out. In the form for high throughput there is room for all, perhaps in [`rows`](Self::rows).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if nothing was received, for rows that are not aligned to 16 bytes
    /// or of another context, and for tokens that arrive as 8-bit floats; those of the launch.
    pub fn group(&self, rows: &impl Buffer<Element = bf16>, stream: &Stream) -> Result<()> {
        self.enqueue_group(&rows.device_slice(), None, stream)
    }

    /// Does what [`group`](Self::group) does, for tokens that arrive as 8-bit floats
    /// ([`f8`](super::ExpertParallelOptions::f8)). `scales` gets their scales as
    /// [`Product::block_scales`](crate::Product::block_scales) takes them: a row-major matrix with
    /// a row for each 128 elements, and a column for each row that `rows` holds, up to
    /// [`most_rows`](Self::most_rows). Errors are those of [`group`](Self::group), but for tokens
    /// of bf16, and for scales that are too few or overlap the rows.
    pub fn group_f8(
        &self,
        rows: &impl Buffer<Element = F8E4M3>,
        scales: &impl Buffer<Element = f32>,
        stream: &Stream,
    ) -> Result<()> {
        self.enqueue_group(&rows.device_slice(), Some(&scales.device_slice()), stream)
    }

    fn enqueue_group<T: Element>(
        &self,
        rows: &DeviceSlice<T>,
        scales: Option<&DeviceSlice<f32>>,
        stream: &Stream,
    ) -> Result<()> {
        self.require_type::<T>()?;
        self.end_flight()?;
        let place @ Place { last, .. } = self.place(stream)?;
        refuse_if!(
            last.stage == Stage::Begin,
            "no tokens have been received: `dispatch` does that"
        );
        let (hidden, most) = (self.options.hidden, self.most_rows());
        let capacity = match self.options.rows {
            // High throughput: rows have their places already.
            Some(_) => most,
            None => (rows.len() / hidden).min(most),
        };
        let at = self.check_rows("the rows of the experts", rows, capacity)?;
        let to = ("the rows of the experts", rows, capacity * hidden);
        let scales = scales.map_or(Ok(0), |scales| {
            let (context, name) = (self.communicator.context(), "the scales of the rows");
            address_apart(context, name, scales, [capacity, hidden / SCALED], to)
        })?;
        let _turn = self.begin(place, stream)?;
        let (grouped, tokens) = (capacity, last.tokens as u32);
        let rows = RowsInOrder { rows: at, scales, capacity: capacity as u32, tokens };
        self.form.group(self, rows, stream)?;
        let least_room = last.least_room.min(capacity);
        let last = Last { stage: Stage::Grouped, grouped, least_room, ..last };
        self.record(place, Some(Stage::Received), last);
        Ok(())
    }

    /// Returns an estimate of the tokens of all ranks, of which this one has `own`, for the grid of
    /// kernels that work with any.
    pub(super) fn expected_tokens(&self, own: u32) -> u32 {
        let ranks = self.communicator.n_ranks() as u32;
        own.max(1).saturating_mul(ranks)
    }

    /// Returns the memory of rows in the order of the experts as an argument. `returns` is the
    /// address of [`Grouped::returns`], or 0 if the kernels have these words in `Counted`.
    pub(super) fn grouped_args(
        &self,
        rows: RowsInOrder,
        returns: u64,
    ) -> impl IntoArg<Abi<Grouped>> {
        let RowsInOrder { rows, scales, capacity, .. } = rows;
        let (offsets, sizes, origins) = (&self.offsets, &self.sizes, &self.origins);
        let alignment = self.options.alignment as u32;
        GroupedArgs { rows, scales, capacity, alignment, offsets, sizes, origins, returns }
    }

    /// Puts rows that arrive in the order of ranks and tokens in that of the experts.
    pub(super) fn lay_out(
        &self,
        received: impl IntoArg<Abi<Received>>,
        returns: &SymmetricBuffer<u32>,
        rows: RowsInOrder,
        stream: &Stream,
    ) -> Result<()> {
        let groups = self.grouped_args(rows, returns.device_address());
        let tokens = self.expected_tokens(rows.tokens);
        let ranks = self.communicator.n_ranks() as u32;
        let args = (shape_args(self.sent), ranks, received, groups, &self.faults);
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
