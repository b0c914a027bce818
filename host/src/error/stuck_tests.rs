//! Tests of the summary of what kernels waited for.

use std::time::Duration;

use devcomm_types::{StuckRecord, WaitFor, WaitKind};

use super::*;
use crate::error::{AbortCause, LaunchError};

const BARRIER: WaitFor =
    WaitFor { kind: WaitKind::LsaBarrier, index: 0, context: 0, peer: 1, wanted: 1, seen: 0 };

fn error(stuck: Vec<StuckWait>) -> String {
    let cause = AbortCause::Deadline { waited: Duration::from_millis(1500) };
    LaunchError::KernelAborted { rank: 3, cause, stuck, objects: Vec::new() }.to_string()
}

fn wait(block: u32, thread: u32, wait: WaitFor) -> StuckWait {
    StuckWait { block, thread, wait }
}

#[test]
fn an_aborted_kernel_is_reported_with_rank_block_thread_and_what_it_waited_for() {
    let signal =
        WaitFor { kind: WaitKind::Signal, index: 7, context: 1, peer: -1, wanted: 4, seen: 3 };
    let text = error(vec![wait(2, 32, signal)]);
    assert_eq!(
        text,
        "rank 3: its kernels were aborted: they had not ended after 1.5 s; what they waited for:
  block 2, thread 32: signal 7 of context 1, which is 3 and not yet 4"
    );
}

#[test]
fn equal_waits_of_many_blocks_are_one_line() {
    let mut stuck: Vec<_> =
        (0..64).map(|block| wait(block, 0, WaitFor { index: block, ..BARRIER })).collect();
    stuck.extend([70, 72].map(|block| wait(block, block - 70, WaitFor { peer: 2, ..BARRIER })));
    let (_, lines) =
        error(stuck).split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    assert_eq!(
        lines,
        "  blocks 0-63, thread 0: LSA barrier 0, where rank 1 has not arrived; also at 1-63
  blocks 70, 72, threads 0, 2: LSA barrier 0, where rank 2 has not arrived"
    );
}

#[test]
fn a_report_has_at_most_twenty_lines_whatever_is_in_it() {
    let signal =
        |seen| WaitFor { kind: WaitKind::Signal, seen: u64::from(seen), wanted: 9999, ..BARRIER };
    let text = error((0..1024).map(|block| wait(block * 2, 0, signal(block))).collect());
    assert_eq!(text.lines().count(), 18);
    assert!(text.ends_with("and 1008 other waits"), "{text}");
    let text = error((0..1024).map(|block| wait(block * 2, 0, BARRIER)).collect());
    assert!(text.len() < 250 && text.contains("blocks 0, 2, 4, 6, 8, 10, 12, 14, ...,"), "{text}");
    assert!(error(vec![]).ends_with("after 1.5 s; no block recorded what it waited for"));
}

#[test]
fn records_of_unknown_kinds_are_left_out_and_the_rest_is_in_order() {
    let record = |kind, block| StuckRecord {
        kind,
        block,
        index: 5,
        context: 0,
        peer: 1,
        thread: 0,
        wanted: 1,
        seen: 0,
    };
    let waits = waits(&[record(1, 1025), record(77, 2), record(3, 3)]);
    assert_eq!(waits.iter().map(|wait| wait.block).collect::<Vec<_>>(), [3, 1025]);
    assert_eq!(
        waits[1].to_string(),
        "block 1025, thread 0: LSA barrier 5, where rank 1 has not arrived"
    );
}
