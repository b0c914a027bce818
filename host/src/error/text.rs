//! Parts of messages.

pub(super) fn on_rank(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!(" on rank {rank}"))
}

pub(super) fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (and 1 other)".to_owned(),
        others => format!(" (and {others} others)"),
    }
}

/// A source that asks for an architecture of its own gets no other.
pub(super) fn arch_advice(arch: &str, (major, minor): (u32, u32)) -> String {
    if arch.ends_with(|last: char| last.is_ascii_alphabetic()) {
        return format!("its source asks for {arch} and no other: launch a kernel for this GPU");
    }
    format!("rebuild with DEVCOMM_CUDA_ARCH=sm_{major}{minor}")
}

pub(super) fn quoted(last_error: &str) -> String {
    let text = last_error.trim();
    if text.is_empty() { String::new() } else { format!(", NCCL says: {text}") }
}

pub(super) fn log_text(log: &str) -> String {
    let log = log.trim();
    if log.is_empty() { String::new() } else { format!("; its log:\n{log}") }
}

pub(super) fn shown(value: &Option<String>) -> String {
    value.as_ref().map_or_else(String::new, |value| format!("={value:?}"))
}

pub(super) fn details(notes: &[String]) -> String {
    if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
}

/// `rank 3`, or `ranks 1, 2, 5`; a long list is cut.
pub(crate) fn ranks(list: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = list.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    if list.len() > SHOWN {
        text.push_str(&format!(" and {} more", list.len() - SHOWN));
    }
    if list.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_are_named_and_a_long_list_is_cut() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[1, 4]), "ranks 1, 4");
        assert!(ranks(&(0..40).collect::<Vec<_>>()).ends_with(", 15 and 24 more"));
    }
}
