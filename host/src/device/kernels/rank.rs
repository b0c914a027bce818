//! The rank's number in the PTX of kernels whose panics print it.

use std::borrow::Cow;

/// The variable of such a kernel's module (`cuda_std`, `arch_nvptx/panic.rs`), an `i32`, as LLVM
/// prints it before its bytes.
const VARIABLE: &str = " DEVCOMM_RANK[4] = {";

/// Returns the PTX with this rank as the variable's value. Kernels without messages have no such
/// variable.
pub(super) fn with_rank(ptx: &str, rank: Option<usize>) -> Cow<'_, str> {
    let (Some(rank), Some((before, bytes))) = (rank, ptx.split_once(VARIABLE)) else {
        return Cow::Borrowed(ptx);
    };
    let Some((_, after)) = bytes.split_once('}') else { return Cow::Borrowed(ptx) };
    // The cast loses nothing: ranks are below 2^20.
    let [a, b, c, d] = (rank as i32).to_le_bytes();
    Cow::Owned(format!("{before}{VARIABLE}{a}, {b}, {c}, {d}}}{after}"))
}

#[cfg(test)]
mod tests {
    use super::with_rank;

    #[test]
    fn the_variable_gets_the_rank_and_nothing_else_changes() {
        let ptx = |bytes: &str| {
            format!(
                ".global .align 4 .b8 DEVCOMM_RANK[4] = {{{bytes}}};\n.entry k()\n{{\nld.u32 \
                 [DEVCOMM_RANK];\n}}\n"
            )
        };
        let unknown = ptx("255, 255, 255, 255");
        assert_eq!(with_rank(&unknown, Some(258)), ptx("2, 1, 0, 0"));
        assert_eq!(with_rank(&unknown, None), unknown);
        assert_eq!(with_rank(".entry k() {}", Some(3)), ".entry k() {}");
    }
}
