//! Weighted sums of experts' rows, which a program computes that exchanges rows by collectives.

use devcomm::{Buffer, DeviceSlice, Kernels, LaunchConfig};
use devcomm_bench_kernels::{NO_ROW, sum_rows};
use half::bf16;

use crate::cases::prelude::*;

/// A table of weighted sums, and the kernel that computes them.
pub(super) struct Sums<'a> {
    kernels: &'a Kernels,
    table: DeviceSlice<u32>,
    rows: usize,
    /// The most terms of a sum.
    terms: usize,
    /// Vectors of eight elements of a row.
    vectors: usize,
}

impl<'a> Sums<'a> {
    /// Makes the table of these sums, each a list of indices of rows with their weights.
    pub(super) fn new(
        harness: &Harness<'_>,
        kernels: &'a Kernels,
        sums: &[Vec<(u32, f32)>],
        hidden: usize,
    ) -> Result<Self> {
        let terms = sums.iter().map(Vec::len).fold(1, usize::max);
        let words = sums.iter().flat_map(|sum| {
            let nothing = std::iter::repeat((NO_ROW, 0.0));
            sum.iter().copied().chain(nothing).take(terms)
        });
        let words: Vec<u32> = words.flat_map(|(row, weight)| [row, weight.to_bits()]).collect();
        let table = harness.comm.mem_alloc(words.len())?.device_slice();
        table.copy_from_host(&words)?;
        Ok(Self { kernels, table, rows: sums.len(), terms, vectors: hidden / 8 })
    }

    /// Computes the sums of these rows.
    pub(super) fn launch(
        &self,
        rows: &DeviceSlice<bf16>,
        sums: &DeviceSlice<bf16>,
        harness: &Harness<'_>,
    ) -> devcomm::Result<()> {
        let Self { kernels, table, terms, vectors, .. } = self;
        let [rows, sums] = [rows, sums].map(DeviceSlice::device_address);
        let sums =
            sum_rows::args(rows, sums, table.device_address(), *terms as u32, *vectors as u32);
        let threads = vectors.next_multiple_of(32).min(harness.choose(1024, 64)) as u32;
        let config = LaunchConfig::new(self.rows as u32, threads);
        let config = config.with_dependent().without_cooperation();
        // SAFETY: the table names rows of the layer, which no other work accesses. Both arrays have
        // the rows of the table, aligned to 16 bytes.
        unsafe { sums.config(config).launch(&kernels.on(&harness.stream)) }
    }
}
