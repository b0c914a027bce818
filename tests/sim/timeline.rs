//! Tests of timelines: of what they show, and that the guide's picture is the one that the program
//! in this file draws.

use std::fs;
use std::path::{Path, PathBuf};

use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, GinConnectionType, Result, Simulation, World};
use devcomm_testing::simulated::{Gpu, run, world};
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// The number of elements of each block's part of a window.
const PART: usize = 256;

/// Each block puts its elements to the next rank, waits for those of the previous one, and doubles
/// them; a barrier of all ranks ends it.
#[kernel(B = gin)]
unsafe fn ring<B: GinBackend>(comm: DevComm, send: Window<f32>, recv: Window<f32>) {
    let (world, coop, block) = (comm.world_team(), Coop::cta(), thread::block_idx_x());
    let (gin, arrived) = (comm.gin::<B>(0), comm.signal(block));
    let (first, next) = (block as usize * PART, (world.rank + 1) % world.n_ranks);
    // SAFETY: the windows have a part for each block, which only it accesses.
    unsafe {
        let put = gin.put(world, next, recv.at(first), send.at(first), PART);
        put.signal(arrived.inc()).post(coop);
        gin.wait_signal(coop, arrived, 1, MemoryOrder::Acquire);
        for i in coop.strided(PART) {
            let mine = recv.local();
            mine.store(first + i, 2.0 * mine.load(first + i));
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
    comm.lsa_barrier(coop, BarrierIndex::this_block()).sync(MemoryOrder::Release);
}

/// Launches [`ring`] with two blocks on a rank.
fn launch_ring(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 2 * PART])?, gpu.window(&[0_f32; 2 * PART])?);
    let requirements = DevCommRequirements::new().lsa_barriers(2).gin_signals(2);
    let comm = gpu.dev_comm(requirements.gin_connection(GinConnectionType::Full))?;
    gpu.launch(ring::args(&comm, &send, &recv).grid(2).block(32))
}

/// Runs `body` on each GPU. Returns the text of the timeline, whose form (trace or picture) the
/// name's extension selects, and the result of the run.
fn timeline(
    simulation: Simulation,
    name: &str,
    body: impl Fn(&Gpu<'_>) -> Result<()> + Sync,
) -> (String, Result<()>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    let world = world(simulation.timeline(&path));
    let ran = run(&world, body).map(drop);
    drop(world);
    (fs::read_to_string(path).unwrap(), ran)
}

/// Returns the text without line numbers, which change with the code above the lines.
fn without_line_numbers(text: &str) -> String {
    let mut parts = text.split(".rs:");
    let first = parts.next().unwrap_or_default().to_string();
    let rest = parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':'));
    rest.fold(first, |text, part| text + ".rs" + part)
}

#[test]
fn the_picture_in_the_guide_is_what_the_program_draws() {
    let (picture, ran) = timeline(Simulation::new(2), "ring.svg", launch_ring);
    ran.unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/src/pictures/timeline.svg");
    if std::env::var_os("DEVCOMM_BLESS").is_some() {
        fs::write(&path, &picture).unwrap();
    }
    let in_guide = fs::read_to_string(&path).unwrap();
    assert!(
        without_line_numbers(&picture) == without_line_numbers(&in_guide),
        "it differs: DEVCOMM_BLESS=1 writes {}",
        path.display()
    );
}

#[test]
fn a_trace_is_the_same_for_the_same_seed_and_shows_waits_and_messages() {
    let trace = |seed| {
        let (trace, ran) = timeline(Simulation::new(2).seed(seed), "ring.json", launch_ring);
        ran.unwrap();
        trace
    };
    let first = trace(1);
    assert_eq!(first, trace(1));
    assert_ne!(first, trace(2));
    for part in [
        r#""name":"process_name","args":{"name":"rank 1"}"#,
        r#""name":"thread_name","args":{"name":"ring, block 1"}"#,
        r#""name":"put of 1024 bytes with a signal","cat":"network""#,
        r#"{"ph":"s","pid":0,"#,
        r#"{"ph":"f","pid":1,"#,
        r#""cat":"wait","args":{"at":"tests/sim/timeline.rs:"#,
        "LSA barrier 0, where rank",
        "kernel `ring",
        "a wait for a stream",
    ] {
        assert!(first.contains(part), "no {part} in {first}");
    }
}

/// Rank 0 waits for a barrier that rank 1 does not enter.
#[kernel]
fn waits_alone(comm: DevComm) {
    if comm.lsa_team().rank == 0 {
        comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::Acquire);
    }
}

#[test]
fn a_failed_run_has_a_timeline_with_the_failure() {
    let (trace, ran) = timeline(Simulation::new(2), "deadlock.json", |gpu| {
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        gpu.launch(waits_alone::args(&comm).grid(1).block(32))
    });
    ran.unwrap_err();
    let wait = "LSA barrier 0, where rank 1 has not arrived\",\"cat\":\"wait\"";
    assert!(trace.contains(wait) && trace.contains("\"name\":\"deadlock"), "{trace}");
}

#[kernel]
fn ends_at_once() {}

#[test]
fn a_stream_does_not_take_the_row_of_one_that_was_dropped() {
    let (trace, ran) = timeline(Simulation::new(1), "streams.json", |gpu| {
        (0..4).try_for_each(|_| {
            let stream = gpu.context().stream()?;
            ends_at_once::args().grid(1).block(1).launch(&stream)?;
            stream.synchronize()
        })
    });
    ran.unwrap();
    let row = |number| format!("\"thread_name\",\"args\":{{\"name\":\"stream {number}\"}}");
    assert!((0..4).all(|number| trace.contains(&row(number))), "{trace}");
}

#[test]
fn a_timeline_that_cannot_be_written_is_refused() {
    let path = PathBuf::from("/dev/null/timeline.json");
    let simulation = Simulation::new(1).timeline(&path);
    let refused = World::builder().simulate(simulation).from_env().map(drop).unwrap_err();
    assert!(refused.to_string().contains("/dev/null/timeline.json"), "{refused}");
    let text = format!("2,timeline={}", path.display());
    assert_eq!(text.parse::<Simulation>().unwrap().to_string(), text);
}
