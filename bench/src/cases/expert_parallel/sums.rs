//! Weighted sums of experts' rows. A program that exchanges rows by collectives computes them.

use devcomm::{DeviceSlice, Kernels, LaunchConfig, SymmetricBuffer};
use devcomm_bench_kernels::{NO_ROW, sum_rows};
use half::bf16;

use crate::cases::prelude::*;

/// The terms of a sum: indices of rows, with their weights.
pub(super) type Terms = Vec<(u32, f32)>;

/// A table of weighted sums, and the kernel that computes them.
pub(super) struct Sums<'a> {
    kernels: &'a Kernels,
    /// The row of each sum, and its terms: words of [`struct@sum_rows`].
    targets: SymmetricBuffer<u32>,
    table: SymmetricBuffer<u32>,
    sums: usize,
    /// The most terms of a sum.
    terms: usize,
    /// Vectors of eight elements of a row.
    vectors: usize,
}

impl<'a> Sums<'a> {
    /// Makes the table of these sums, each with the row that it becomes.
    pub(super) fn new(
        harness: &Harness<'_>,
        kernels: &'a Kernels,
        sums: &[(u32, Terms)],
        hidden: usize,
    ) -> Result<Self> {
        let terms = sums.iter().map(|(_, sum)| sum.len()).fold(1, usize::max);
        let words = sums.iter().flat_map(|(_, sum)| {
            let nothing = std::iter::repeat((NO_ROW, 0.0));
            sum.iter().copied().chain(nothing).take(terms)
        });
        // The last word of each is unused: a buffer is not empty.
        let words = words.flat_map(|(row, weight)| [row, weight.to_bits()]).chain([0]);
        let targets = sums.iter().map(|(target, _)| *target).chain([0]);
        Ok(Self {
            kernels,
            targets: harness.filled(&targets.collect::<Vec<u32>>())?,
            table: harness.filled(&words.collect::<Vec<u32>>())?,
            sums: sums.len(),
            terms,
            vectors: hidden / 8,
        })
    }

    /// Computes the sums of these rows. Both buffers have the rows that the table names.
    pub(super) fn launch(
        &self,
        rows: &DeviceSlice<bf16>,
        sums: &DeviceSlice<bf16>,
        harness: &Harness<'_>,
    ) -> devcomm::Result<()> {
        let Self { kernels, targets, table, vectors, .. } = self;
        if self.sums == 0 {
            return Ok(());
        }
        let [rows, sums] = [rows, sums].map(DeviceSlice::device_address);
        let [targets, table] = [targets, table].map(SymmetricBuffer::device_address);
        let (terms, vectors) = (self.terms as u32, *vectors as u32);
        let launch = sum_rows::args(rows, sums, targets, table, terms, vectors);
        let threads = vectors.next_multiple_of(32).min(harness.choose(1024, 64));
        let config = LaunchConfig::new(self.sums as u32, threads).with_dependent();
        // SAFETY: the callers pass the arrays that the table was made for; they are aligned to 16
        // bytes, as `hidden` is a multiple of 8. Only work before and after this in the stream
        // accesses them, and they live as long as the contender that launches this.
        unsafe { launch.config(config).launch(&kernels.on(&harness.stream)) }
    }
}
