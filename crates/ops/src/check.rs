//! Checks of arguments: errors name what the kernels do not support.

use devcomm_host::{Context, DeviceSlice, Element, Error, Result, Window};

/// Returns an [`Error::InvalidInput`] with this text if a condition holds.
macro_rules! refuse_if {
    ($condition:expr, $($text:tt)+) => {
        if $condition {
            return $crate::check::refuse(::std::fmt::format(format_args!($($text)+)));
        }
    };
}

pub(crate) use refuse_if;

pub(crate) fn check_len(name: &str, len: usize, rows: usize, columns: usize) -> Result<()> {
    refuse_if!(
        rows.checked_mul(columns).is_none_or(|needed| len < needed),
        "{name} has {len} elements, but needs {rows} x {columns}"
    );
    Ok(())
}

fn check_alignment(name: &str, address: u64) -> Result<()> {
    refuse_if!(
        !address.is_multiple_of(16),
        "{name} begins at {address:#x}, which is not a multiple of 16"
    );
    Ok(())
}

/// Returns the address of a buffer of this context with enough elements.
pub(crate) fn address<E>(
    context: &Context,
    name: &str,
    slice: &DeviceSlice<E>,
    rows: usize,
    columns: usize,
) -> Result<u64> {
    require_context(name, slice.context(), context)?;
    check_len(name, slice.len(), rows, columns)?;
    Ok(slice.device_address())
}

/// Returns what [`address`] does, if it is a multiple of 16.
pub(crate) fn aligned<E>(
    context: &Context,
    name: &str,
    slice: &DeviceSlice<E>,
    rows: usize,
    columns: usize,
) -> Result<u64> {
    let address = address(context, name, slice, rows, columns)?;
    check_alignment(name, address)?;
    Ok(address)
}

/// Returns the window that a buffer is in, with elements `W`, and the buffer's first index there.
pub(crate) fn window<W: Element, T: Element>(
    what: &str,
    slice: &DeviceSlice<T>,
) -> Result<(Window<W>, usize)> {
    match Window::containing(slice) {
        Some(window) => Ok(window),
        None => refuse(format!("{what} is in no window")),
    }
}

/// Returns the rows of each rank, if the ranks can share `m` rows equally.
pub(crate) fn rows_of_each(m: usize, ranks: usize) -> Result<usize> {
    refuse_if!(!m.is_multiple_of(ranks), "m is {m}, and no multiple of the {ranks} ranks");
    Ok(m / ranks)
}

/// Returns an [`Error::InvalidInput`] with this text.
pub(crate) fn refuse<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::InvalidInput { what: what.into() })
}

pub(crate) fn require_context(what: &str, context: &Context, own: &Context) -> Result<()> {
    refuse_if!(!context.is(own), "{what} belongs to another CUDA context");
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
