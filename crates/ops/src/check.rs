//! Checks the shape and the buffers of a product: errors name what the kernels do not support.

use devcomm_host::{Context, Error, Result};

/// The shape as kernel arguments, if it has elements that 32-bit numbers count.
pub(crate) fn check_extents([m, n, k]: [usize; 3]) -> Result<[u32; 3]> {
    if m == 0 || n == 0 || k == 0 {
        return refuse(format!("a product of {m} x {n} elements with {k} terms has nothing to do"));
    }
    // TMA coordinates are signed 32-bit numbers, and the last tile may extend past the matrix.
    let most = i32::MAX as usize - 512;
    if m > most || n > most || k > most {
        return refuse(format!(
            "m, n and k are {m}, {n} and {k}, but {most} is the maximum of each"
        ));
    }
    Ok([m as u32, n as u32, k as u32])
}

/// As [`check_extents`], for kernels whose rows of A and B are aligned.
pub(crate) fn check_shape(shape @ [.., k]: [usize; 3]) -> Result<[u32; 3]> {
    let extents = check_extents(shape)?;
    if !k.is_multiple_of(8) {
        return refuse(format!(
            "k is {k}, but rows of A and B begin at multiples of 16 bytes: pad k with zeros to a \
             multiple of 8"
        ));
    }
    Ok(extents)
}

pub(crate) fn check_len(name: &str, len: usize, rows: usize, columns: usize) -> Result<()> {
    if rows.checked_mul(columns).is_none_or(|needed| len < needed) {
        return refuse(format!("{name} has {len} elements, but needs {rows} x {columns}"));
    }
    Ok(())
}

pub(crate) fn check_buffer(
    name: &str,
    address: u64,
    len: usize,
    rows: usize,
    columns: usize,
) -> Result<()> {
    check_len(name, len, rows, columns)?;
    if !address.is_multiple_of(16) {
        return refuse(format!("{name} begins at {address:#x}, which is not a multiple of 16"));
    }
    Ok(())
}

/// The rows of each rank, if ranks share `m` of them equally.
pub(crate) fn rows_of_each(m: usize, ranks: usize) -> Result<usize> {
    if !m.is_multiple_of(ranks) {
        return refuse(format!("m is {m}, and no multiple of the {ranks} ranks"));
    }
    Ok(m / ranks)
}

/// Whether TMA loads matrices at these addresses.
pub(crate) fn are_aligned(addresses: [u64; 3]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(16))
}

/// Refuses matrices that TMA does not load, for a plan of this name.
pub(crate) fn require_aligned(plan: &str, addresses: [u64; 3]) -> Result<()> {
    if !are_aligned(addresses) {
        return refuse(format!("the plan `{plan}` needs A, B and C at multiples of 16 bytes"));
    }
    Ok(())
}

/// An [`Error::InvalidInput`] with this text.
pub(crate) fn refuse<T>(what: String) -> Result<T> {
    Err(Error::InvalidInput { what })
}

pub(crate) fn require_context(what: &str, context: &Context, own: &Context) -> Result<()> {
    if !context.is(own) {
        return refuse(format!("{what} belongs to another CUDA context"));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn message<T>(result: Result<T>) -> String {
        match result {
            Ok(_) => "it was accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_shape_that_the_kernel_cannot_do_is_refused_with_the_reason() {
        assert_eq!(check_shape([1, 7, 8]).unwrap(), [1, 7, 8]);
        assert!(message(check_shape([0, 7, 8])).contains("nothing to do"));
        assert!(message(check_shape([1, 7, 0])).contains("nothing to do"));
        assert!(message(check_shape([1, 7, 12])).contains("k is 12"));
        assert!(message(check_shape([1, 1 << 32, 8])).contains("is the maximum"));
    }

    #[test]
    fn a_matrix_that_is_too_short_or_not_aligned_is_refused_by_its_name() {
        assert!(check_buffer("A", 0x100, 56, 7, 8).is_ok());
        assert!(message(check_buffer("A", 0x100, 55, 7, 8)).contains("A has 55 elements"));
        assert!(message(check_buffer("C", 0x108, 56, 7, 8)).contains("C begins at 0x108"));
        assert!(message(check_buffer("B", 0, usize::MAX, usize::MAX, 2)).contains("B has"));
    }
}
