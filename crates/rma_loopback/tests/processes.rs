//! Ranks in several processes: this test program starts itself again for each.

mod fake;
mod strangers;

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use devcomm_rma_loopback::abi::{REMOTE_ERROR, SIGNAL_ADD, SUCCESS, TIMEOUT, UNHANDLED_CUDA_ERROR};
use devcomm_rma_loopback::config::{Config, CopyMethod};

use fake::bootstrap::{Client, HandleBytes, serve};
use fake::{Memory, Options, Rank, device, listen, ok, work};

/// The test that child processes run. Any test that calls [`run_processes`] serves.
const TEST: &str = "complete_operations_have_moved_their_data";

/// Runs the case `name` in `processes` processes of `threads` ranks each; returns each process's
/// standard error. Processes in `may_fail` may fail. A child process runs its ranks and exits here.
fn run_processes(name: &str, processes: usize, threads: usize, may_fail: &[usize]) -> Vec<String> {
    if let (Ok(case), Some(server)) = (std::env::var("CASE"), std::env::var_os("BOOTSTRAP")) {
        run_child(&case, Path::new(&server));
        std::process::exit(0);
    }
    let folder = tempfile::tempdir().unwrap();
    let server = folder.path().join("bootstrap");
    let listener = UnixListener::bind(&server).unwrap();
    let children: Vec<_> = (0..processes)
        .map(|process| {
            Command::new(std::env::current_exe().unwrap())
                .args([TEST, "--exact", "--nocapture"])
                .env("CASE", format!("{name} {process} {processes} {threads}"))
                .env("BOOTSTRAP", &server)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    std::thread::spawn(move || serve(&listener, processes * threads));
    let ended = children.into_iter().enumerate().map(|(process, child)| {
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() || may_fail.contains(&process),
            "process {process}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            stderr
        );
        stderr
    });
    ended.collect()
}

/// Runs the ranks of one process, as threads.
fn run_child(case: &str, server: &Path) {
    let words: Vec<&str> = case.split(' ').collect();
    let number = |index: usize| words[index].parse::<usize>().unwrap();
    let (name, process, processes, threads) = (words[0], number(1), number(2), number(3));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || run(name, process * threads + thread, processes * threads, server));
        }
    });
}

/// Runs rank `number` of the case `name`.
fn run(name: &str, number: usize, ranks: usize, server: &Path) {
    let mut options = Options { ranks, ..Options::default() };
    match name {
        "small" | "untested" => {
            options.config = Config { slots: 2, slot_bytes: 4096, depth: 2, ..options.config };
        }
        "staged" => options.config.copy = CopyMethod::Staged,
        "contexts" => (options.contexts, options.reductions) = (3, true),
        "slow" => options.delay = 500,
        "signal-and-go" => options.delay = 2000,
        "late" => options.config.timeout = Duration::from_millis(300),
        "impatient" if number == 1 => options.config.timeout = Duration::from_millis(300),
        _ => {}
    }
    let device = device(number, &options);
    let client = Client::connect(server, number, ranks);
    let listening = listen();
    let mut handles = client.all_gather(listening.handle, || {});
    match name {
        "absent" => return absent(number, &listening, &mut handles),
        "late" => return late(number, &listening, &mut handles),
        "impatient" => return impatient(number, &listening, &mut handles),
        "squatted" => return squatted(number, &listening, &mut handles, &client),
        _ => {}
    }
    let visits = name == "strangers" && number == 1;
    let visitors = if visits { strangers::visit(&handles[0]) } else { Vec::new() };
    let rank = Rank::connect(&options, number, device, &listening, &mut handles);
    strangers::require_refused(visitors);
    let barrier = || client.barrier(|| ok(rank.try_progress()));
    match name {
        "slow" => {
            work::one_by_one(&rank, &barrier);
            rank.close();
        }
        "killed" => killed(&rank, &barrier),
        "failed" => failed(&rank, &barrier),
        "left" => left(&rank, &barrier),
        "signal-and-go" => signal_and_go(&rank, &barrier),
        "untested" => untested(&rank, &barrier),
        "stuck" => stuck(&rank, &barrier),
        _ => {
            work::traffic(&rank, options.contexts, &barrier);
            work::ranges(&rank, &barrier);
            barrier();
            rank.close();
        }
    }
}

#[test]
fn puts_gets_and_signals_cross_processes_in_order() {
    run_processes("plain", 2, 1, &[]);
    run_processes("contexts", 3, 1, &[]);
}

#[test]
fn complete_operations_have_moved_their_data() {
    run_processes("slow", 2, 1, &[]);
}

#[test]
fn operations_cross_processes_in_order_with_full_queues_and_slots() {
    run_processes("small", 2, 1, &[]);
}

#[test]
fn some_ranks_may_share_a_process() {
    run_processes("plain", 2, 2, &[]);
    run_processes("staged", 2, 2, &[]);
}

/// Polls until the plugin returns an error, which it must do within 5 seconds; returns it.
fn error_of(rank: &Rank) -> i32 {
    let start = Instant::now();
    loop {
        match rank.try_progress() {
            SUCCESS => assert!(start.elapsed() < Duration::from_secs(5), "no error is reported"),
            status => {
                assert!(rank.has_error());
                return status;
            }
        }
        std::thread::yield_now();
    }
}

fn killed(rank: &Rank, barrier: &dyn Fn()) {
    let memory = Memory::new(64);
    let at = rank.window(&memory);
    barrier();
    if rank.rank == 1 {
        std::process::abort();
    }
    let (status, _) = rank.try_put(0, (at, 0), 64, (at, 0), 1);
    assert!(status == SUCCESS || status == REMOTE_ERROR);
    assert_eq!(error_of(rank), REMOTE_ERROR);
    // NCCL's thread continues to call.
    (0..100).for_each(|_| assert_eq!(rank.try_progress(), REMOTE_ERROR));
}

#[test]
fn the_death_of_a_process_is_an_error_of_all_others_which_is_logged_once() {
    let stderr = run_processes("killed", 3, 1, &[1]);
    for of_survivor in [&stderr[0], &stderr[2]] {
        assert_eq!(of_survivor.matches("error: ").count(), 1, "{of_survivor}");
    }
}

fn failed(rank: &Rank, barrier: &dyn Fn()) {
    let memory = Memory::new(64);
    let at = rank.window(&memory);
    barrier();
    if rank.rank == 1 {
        rank.device.copies_left.store(0, Ordering::Relaxed);
        assert_eq!(rank.try_put(0, (at, 0), 64, (at, 0), 0).0, UNHANDLED_CUDA_ERROR);
    } else {
        assert_eq!(error_of(rank), REMOTE_ERROR);
    }
}

#[test]
fn a_failure_in_one_process_is_an_error_of_all_others() {
    run_processes("failed", 3, 1, &[]);
}

fn left(rank: &Rank, barrier: &dyn Fn()) {
    let memory = Memory::new(64);
    let at = rank.window(&memory);
    barrier();
    if rank.rank == 1 {
        rank.close();
        return;
    }
    // A rank that closes without an error affects others only when they put to it.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        ok(rank.try_progress());
    }
    let (status, _) = rank.try_put(0, (at, 0), 64, (at, 0), 1);
    assert_eq!(status, REMOTE_ERROR);
    assert!(rank.has_error());
    rank.close();
}

#[test]
fn a_put_to_a_process_that_has_closed_is_an_error() {
    run_processes("left", 2, 1, &[]);
}

/// Rank 1 destroys everything as soon as it has seen the last signal: rank 0 still sees its puts
/// complete.
fn signal_and_go(rank: &Rank, barrier: &dyn Fn()) {
    let (memory, signals) = (Memory::new(64), Memory::new(8));
    let (at, signals_at) = (rank.window(&memory), rank.signals(&signals));
    barrier();
    if rank.rank == 0 {
        for _ in 0..20 {
            rank.put(0, (at, 0), 64, (at, 0), 1);
            rank.signal(0, 1, (signals_at, 0), 1);
        }
        rank.drain();
    } else {
        rank.serve(|| signals.load(0) == 20);
    }
    rank.close();
}

#[test]
fn a_rank_that_closes_completes_the_requests_of_others() {
    for _ in 0..4 {
        run_processes("signal-and-go", 2, 1, &[]);
    }
}

/// Rank 0 puts more data than the slots hold, tests no request, and destroys its context.
fn untested(rank: &Rank, barrier: &dyn Fn()) {
    const BYTES: usize = 5000;
    let (inline, window, signals) =
        (Memory::filled(BYTES, |_| 7), Memory::new(20 * BYTES), Memory::new(8));
    let (inline_at, window_at) = (rank.host(&inline), rank.window(&window));
    let signals_at = rank.signals(&signals);
    barrier();
    if rank.rank == 0 {
        for index in 0..20 {
            let (from, to) = ((inline_at, 0), (window_at, index * BYTES));
            let signal = (signals_at, 0);
            ok(rank.try_put_signal(0, from, BYTES, to, 1, signal, 1, SIGNAL_ADD).0);
        }
        rank.destroy_context();
        inline.write(0, &[0xee; BYTES]);
        ok(rank.deregister(inline_at));
    } else {
        rank.serve(|| signals.load(0) == 20);
        assert!(window.read(0, 20 * BYTES) == [7; 20 * BYTES], "a put read freed memory");
    }
    rank.close();
}

#[test]
fn destroying_a_context_waits_for_its_requests_to_other_processes() {
    run_processes("untested", 2, 1, &[]);
}

/// The stream of rank 1 never executes a put of rank 0.
fn stuck(rank: &Rank, barrier: &dyn Fn()) {
    let memory = Memory::new(64);
    let at = rank.window(&memory);
    rank.device.stalled.store(rank.rank == 1, Ordering::Release);
    barrier();
    if rank.rank == 0 {
        ok(rank.try_put(0, (at, 0), 64, (at, 0), 1).0);
    } else {
        rank.serve(|| rank.device.batches.load(Ordering::Relaxed) > 0);
    }
    barrier();
    let start = Instant::now();
    rank.close();
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn processes_close_in_time_although_a_stream_never_becomes_idle() {
    run_processes("stuck", 2, 1, &[]);
}

/// Rank 1 of three ends before it connects: its peers get an error long before the timeout.
fn absent(number: usize, listening: &fake::Listening, handles: &mut [HandleBytes]) {
    if number != 1 {
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        assert_eq!(listening.connect(handles, number).0, REMOTE_ERROR);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn connecting_to_a_process_that_is_gone_is_an_error_at_once() {
    run_processes("absent", 3, 1, &[]);
}

/// Rank 0 of two ends before rank 1 connects; another user, if there is one, listens in its place.
fn squatted(
    number: usize,
    listening: &fake::Listening,
    handles: &mut [HandleBytes],
    client: &Client,
) {
    if number == 0 {
        listening.close();
    }
    let squatter = (number == 0).then(|| strangers::listen_as_another(&handles[0])).flatten();
    client.barrier(|| ());
    if number == 1 {
        assert_eq!(listening.connect(handles, 1).0, REMOTE_ERROR);
    }
    client.barrier(|| ());
    if let Some(squatter) = squatter {
        // A rank sends its memory with the first byte.
        let read = squatter.accept().unwrap().0.read(&mut [0]).unwrap();
        assert_eq!(read, 0);
    }
}

#[test]
fn another_user_in_place_of_a_rank_that_has_ended_gets_no_memory() {
    run_processes("squatted", 2, 1, &[]);
}

#[test]
fn processes_that_are_not_ranks_are_refused_and_the_ranks_connect() {
    run_processes("strangers", 3, 1, &[]);
}

/// Rank 1 of two listens, but does not connect in time.
fn late(number: usize, listening: &fake::Listening, handles: &mut [HandleBytes]) {
    match number {
        0 => assert_eq!(listening.connect(handles, 0).0, TIMEOUT),
        _ => std::thread::sleep(Duration::from_millis(600)),
    }
}

#[test]
fn connecting_to_a_process_that_does_not_answer_ends_in_time() {
    run_processes("late", 2, 1, &[]);
}

/// Rank 2 of three listens, but does not connect; rank 1 has a shorter timeout than the others.
fn impatient(number: usize, listening: &fake::Listening, handles: &mut [HandleBytes]) {
    match number {
        0 => assert_eq!(listening.connect(handles, 0).0, REMOTE_ERROR),
        1 => assert_eq!(listening.connect(handles, 1).0, TIMEOUT),
        _ => std::thread::sleep(Duration::from_secs(2)),
    }
}

#[test]
fn a_rank_that_fails_to_connect_sends_the_reason_to_connected_ranks() {
    let stderr = run_processes("impatient", 3, 1, &[]);
    assert!(stderr[0].contains("rank 1 failed: rank 2"), "{}", stderr[0]);
}
