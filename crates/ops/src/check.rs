//! Checks of arguments: errors name what the kernels do not support.

use devcomm_host::{Buffer, Communicator, Context, DeviceSlice, Element, Error, Result, Window};

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

pub(crate) fn aligned<E>(
    context: &Context,
    name: &str,
    slice: &DeviceSlice<E>,
    rows: usize,
    columns: usize,
) -> Result<u64> {
    let address = address(context, name, slice, rows, columns)?;
    refuse_if!(
        !address.is_multiple_of(16),
        "{name} begins at {address:#x}, which is not a multiple of 16"
    );
    Ok(address)
}

/// Fails if the first elements of two buffers overlap, each given with its name and that number,
/// unless both begin at one address and `place` is `Some(0)`.
pub(crate) fn require_apart<T, U>(
    (name, from, len): (&str, &DeviceSlice<T>, usize),
    (name_of_to, to, len_of_to): (&str, &DeviceSlice<U>, usize),
    place: Option<isize>,
) -> Result<()> {
    // Parts are made only of buffers that overlap as a whole.
    refuse_if!(
        !from.is_apart_or_at(to, place)
            && !from.slice(..len)?.is_apart_or_at(&to.slice(..len_of_to)?, place),
        "{name} and {name_of_to} overlap: {name_of_to} is memory of its own{}",
        if place.is_some() { format!(", or begins where {name} does") } else { String::new() }
    );
    Ok(())
}

/// Returns the [`address`] of a matrix that is [apart](require_apart) from `to`.
pub(crate) fn address_apart<T, U>(
    context: &Context,
    name: &str,
    slice: &DeviceSlice<T>,
    [rows, columns]: [usize; 2],
    to: (&str, &DeviceSlice<U>, usize),
) -> Result<u64> {
    let at = address(context, name, slice, rows, columns)?;
    require_apart((name, slice, rows * columns), to, None)?;
    Ok(at)
}

/// Returns the window of a communicator that a buffer is in, with elements `W`, and the buffer's
/// first index there.
pub(crate) fn window<W: Element, T: Element>(
    what: &str,
    slice: &DeviceSlice<T>,
    comm: &Communicator,
) -> Result<(Window<W>, usize)> {
    let refused = || refuse(format!("{what} is in no window of this communicator"));
    Window::containing(slice, comm).map_or_else(refused, Ok)
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
