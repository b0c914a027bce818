//! The matrices of a launch, and their maps for TMA.

use devcomm_host::TensorMapDesc;
use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Division, Shape};
use devcomm_kernels::gemm::gemm_wgmma as wide;

use super::element::{GemmElement, GemmOutput};
use super::epilogue::{Added, EpilogueArgs};
use crate::prelude::*;

/// A launch's matrices, as their addresses, and its epilogue. `groups` of rows have a B each.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) shape: [u32; 3],
    pub(crate) groups: u32,
    pub(crate) transposed: [bool; 2],
    /// The addresses of matrices of scales for A and B, or 0 without them.
    pub(crate) block_scales: [u64; 2],
    pub(crate) epilogue: EpilogueArgs,
}

impl Matrices {
    /// Checks that A, B and C with these rows, and what is added to the product, have the elements
    /// and are of the context, and that C overlaps none of the others.
    pub(crate) fn checked<T, O>(
        context: &Context,
        extents: Extents,
        (a, b, c): (&DeviceSlice<T>, &DeviceSlice<T>, &DeviceSlice<O>),
        [rows_of_a, rows_of_b, rows_of_c]: [usize; 3],
        added: &Added<O>,
    ) -> Result<Self> {
        let [_, n, k] = extents.lengths();
        let matrices = Self {
            a: address(context, "A", a, rows_of_a, k)?,
            b: address(context, "B", b, rows_of_b, k)?,
            c: address(context, "C", c, rows_of_c, n)?,
            shape: extents.array(),
            groups: 1,
            transposed: [false; 2],
            block_scales: [0; 2],
            epilogue: added.args(context, [rows_of_c, n])?,
        };
        let len_of_c = rows_of_c * n;
        let to = ("C", c, len_of_c);
        require_apart(("A", a, rows_of_a * k), to, None)?;
        require_apart(("B", b, rows_of_b * k), to, None)?;
        let Added { bias, residual, .. } = added;
        bias.iter().try_for_each(|bias| require_apart(("the bias", bias, n), to, None))?;
        residual.iter().try_for_each(|residual| {
            require_apart(("the residual", residual, len_of_c), to, Some(0))
        })?;
        Ok(matrices)
    }

    /// Returns whether TMA can load and store them.
    pub(crate) fn are_aligned(&self) -> bool {
        (self.a | self.b | self.c).is_multiple_of(16)
    }
}

pub(crate) fn map<T: Element>(
    stream: &Stream,
    address: u64,
    [rows, columns, tile_rows]: [u32; 3],
) -> Result<TensorMap> {
    let data_type = T::DATA_TYPE;
    let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
    stream.context().tensor_map(&desc)
}

/// Returns the maps of A, B and C for tiles of `gemm_wgmma`, and 0; or, if C's rows are not
/// aligned, any map in place of C's, and its address.
pub(crate) fn wide_maps<T: GemmElement, O: GemmOutput<T>>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], groups, transposed, .. }: Matrices,
) -> Result<([TensorMap; 3], u64)> {
    let factor = |address, rows, tile_rows, transposed| match transposed {
        false => map::<T>(stream, address, [rows, k, tile_rows]),
        true => map::<T>(stream, address, [k, rows, wide::TRANSPOSED]),
    };
    let a = factor(a, m, wide::TILE_M, transposed[0])?;
    let b = factor(b, groups * n, wide::TILE_N / wide::CLUSTER, transposed[1])?;
    let (map_of_c, unaligned) = match n.is_multiple_of(16 / size_of::<O>() as u32) {
        true => (map::<O>(stream, c, [m, n, wide::STORE_M])?, 0),
        false => (a, c),
    };
    Ok(([a, b, map_of_c], unaligned))
}

pub(crate) fn swapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, TensorMap)> {
    Ok((
        map::<T>(stream, a, [m, k, S::M / across])?,
        map::<T>(stream, b, [n, k, S::N / down])?,
        map::<T>(stream, c, [m, n, swapped::STORE_M])?,
    ))
}

pub(super) fn unswapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, u64)> {
    let map = |address, tiles| map::<T>(stream, address, tiles);
    Ok((map(a, [m, k, S::N / down])?, map(b, [n, k, S::M / across])?, c))
}
