//! The guide's listings that run on simulated GPUs only, and the simulator's reports of planted
//! mistakes: `src/reports`, which the chapters include; the tests write them if `DEVCOMM_BLESS=1`.

use std::fs;
use std::path::Path;
use std::process::Command;

use devcomm::sim::{Change, Mutation};
use devcomm::{
    Check, DevCommRequirements, DevCommResource, Error, GinConnectionType, Rank, Simulation,
    SymmetricBuffer, World,
};
use kernels::{debugging, gin, mistakes, normalize, sum_of_all, teams};
use norm::KERNELS;

/// The ranks of two LSA teams know their places.
#[test]
fn ranks_of_two_teams_know_their_places() {
    // ANCHOR: who
    let world = World::builder().simulate(Simulation::new(4).team_size(2)).from_env().unwrap();
    let found = world.run(|rank| {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let out = comm.window::<i32>(6)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        teams::who_am_i::args(&dev, &out).grid(1).block(1).launch(&stream)?;
        let mut numbers = [0; 6];
        stream.copy_to_host(&out, &mut numbers)?;
        Ok::<_, Error>(numbers)
    });
    // Rank 3 of 4 is LSA rank 1 of 2, and rail rank 1 of 2.
    assert_eq!(found.unwrap()[3], [3, 4, 1, 2, 1, 2]);
    // ANCHOR_END: who
}

/// Returns a machine of two GPUs that reach each other by GIN only.
fn network() -> Simulation {
    Simulation::new(2).team_size(1)
}

fn dev_comm_for_gin(rank: &Rank) -> Result<DevCommResource, Error> {
    let connection = GinConnectionType::Full;
    let requirements = DevCommRequirements::new().gin_signals(1).world_gin_barriers(1);
    rank.communicator()?.create_dev_comm(requirements.gin_connection(connection))
}

#[test]
fn a_ring_over_the_network_doubles_what_arrives() {
    // ANCHOR: ring
    let machine = Simulation::new(2).team_size(1); // two GPUs that reach each other by GIN only
    Check::new(machine).in_order().random(5).lagging(2).run(|rank| {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (source, target) = (comm.window::<f32>(10)?, comm.window::<f32>(10)?);
        let requirements = DevCommRequirements::new().gin_signals(1).world_gin_barriers(1);
        let dev = comm.create_dev_comm(requirements.gin_connection(GinConnectionType::Full))?;
        for launch in 1..=3 {
            stream.fill(&source, (launch * (rank.rank() + 1)) as f32)?;
            gin::ring::args(&dev, &source, &target).grid(1).block(32).launch(&stream)?;
            let mut doubled = [0.0; 10];
            stream.copy_to_host(&target, &mut doubled)?;
            assert_eq!(doubled, [(2 * launch * (2 - rank.rank())) as f32; 10]);
        }
        Ok::<_, Error>(())
    });
    // ANCHOR_END: ring
}

/// Returns the error of a run that fails.
fn report(machine: Simulation, run: impl Fn(&Rank) -> Result<(), Error> + Sync) -> String {
    let world = World::builder().simulate(machine).from_env().unwrap();
    let failed = world.run(|rank| {
        rank.load(&KERNELS)?;
        run(rank)
    });
    failed.expect_err("the mistake is found").to_string()
}

/// Returns the number of the line of a kernel file that has this text.
fn line_of(file: &str, text: &str) -> u32 {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src").join(file);
    let source = fs::read_to_string(path).unwrap();
    1 + source.lines().position(|line| line.contains(text)).unwrap() as u32
}

/// Checks that a report of `mistakes.rs` names the lines that have these texts, and is the one that
/// a chapter shows.
fn check_report(name: &str, report: &str, lines: &[&str]) {
    check_report_of("mistakes.rs", name, report, lines);
}

fn check_report_of(file: &str, name: &str, report: &str, lines: &[&str]) {
    for line in lines {
        let place = format!("{file}:{}:", line_of(file, line));
        assert!(report.contains(&place), "no {place} `{line}` in: {report}");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = folder.join("src/reports").join(format!("{name}.txt"));
    let shown = wrapped(&report.replace("docs/guide/kernels/", ""));
    if std::env::var_os("DEVCOMM_BLESS").is_some() {
        fs::write(path, shown).unwrap();
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(shown, expected, "DEVCOMM_BLESS=1 writes {}", path.display());
}

/// Returns a text in lines of at most 90 characters.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    for line in text.lines() {
        let mut width = 0;
        for word in line.split(' ') {
            let len = word.chars().count();
            if width > 0 && width + 1 + len > 90 {
                lines.push('\n');
                width = 0;
            } else if width > 0 {
                lines.push(' ');
                width += 1;
            }
            lines.push_str(word);
            width += len;
        }
        lines.push('\n');
    }
    lines
}

/// The first chapter plants this race: the second barrier of the first kernel orders nothing.
#[test]
fn the_race_that_the_first_chapter_plants_is_found() {
    let line = line_of("norm.rs", "barrier.sync(MemoryOrder::AcqRel)");
    let planted = Mutation::new("norm.rs", line, Change::Relax);
    let report = report(Simulation::new(2).mutation(planted), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let [x, sums, out] = [comm.window::<f32>(50)?, comm.window(2)?, comm.window(50)?];
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        stream.fill(&x, 1.0)?;
        normalize::args(&dev, &x, &sums, &out, 2.0).grid(1).block(64).launch(&stream)?;
        stream.synchronize()
    });
    let lines = ["sums.lsa(peer as i32).store", "total += unsafe { sums.local().load(rank) }"];
    check_report_of("norm.rs", "planted", &report, &lines);
}

/// The README plants this race: the first barrier of its kernel orders nothing.
#[test]
fn the_race_that_the_readme_plants_is_found() {
    let line = line_of("sum_of_all.rs", "barrier.sync(MemoryOrder::Acquire)");
    let planted = Mutation::new("sum_of_all.rs", line, Change::Relax);
    let report = report(Simulation::new(4).mutation(planted), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (send, out) = (comm.window::<f32>(100)?, comm.window::<f32>(100)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(4))?;
        stream.fill(&send, rank.rank() as f32)?;
        sum_of_all::sum_of_all::args(&dev, &send, &out).grid(4).block(32).launch(&stream)?;
        stream.synchronize()
    });
    check_report_of("sum_of_all.rs", "readme", &report, &["send.lsa(peer).load(i)"]);
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    let report = report(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (sums, out) = (comm.window::<f32>(2)?, comm.window::<f32>(1)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let launch = mistakes::no_barrier::args(&dev, 1.0, &sums, &out);
        // SAFETY: the windows have these elements.
        unsafe { launch.grid(1).block(1).launch(&stream)? };
        stream.synchronize()
    });
    let lines = ["sums.lsa(peer).store", "total += unsafe { sums.local().load(rank) }"];
    check_report("no_barrier", &report, &lines);
}

#[test]
fn a_barrier_without_an_order_is_a_race() {
    let report = report(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (inbox, out) = (comm.window::<f32>(1)?, comm.window::<f32>(1)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        // SAFETY: the windows have an element.
        unsafe { mistakes::relaxed::args(&dev, &inbox, &out).grid(1).block(1).launch(&stream)? };
        stream.synchronize()
    });
    check_report("relaxed", &report, &["inbox.lsa(team.next()).store", "inbox.local().load(0));"]);
}

#[test]
fn a_flag_of_too_narrow_a_scope_is_a_race() {
    let report = report(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (data, flag) = (comm.window::<f32>(1)?, comm.window::<u32>(1)?);
        flag.fill_bytes(0)?;
        rank.barrier()?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        // SAFETY: the windows have an element.
        unsafe { mistakes::narrow::args(&dev, &data, &flag).grid(1).block(1).launch(&stream)? };
        stream.synchronize()
    });
    check_report("narrow", &report, &["Order::Release, Scope::Gpu", "Order::Acquire, Scope::Gpu"]);
}

#[test]
fn threads_of_a_block_that_do_not_meet_race() {
    let report = report(Simulation::new(1), |rank| {
        let stream = rank.stream()?;
        let out = SymmetricBuffer::<f32>::new(rank.library(), rank.context(), 64)?;
        // SAFETY: the buffer has an element for each thread.
        unsafe { mistakes::block::args(&out).grid(1).block(64).launch(&stream)? };
        stream.synchronize()
    });
    check_report("block", &report, &["mem::store(tile.add(i), i as f32)", "tile.add(63 - i)"]);
}

#[test]
fn data_that_is_read_before_its_signal_is_a_race() {
    let report = report(network(), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let [source, target, out] = [comm.window::<f32>(1)?, comm.window(1)?, comm.window(1)?];
        let dev = dev_comm_for_gin(rank)?;
        let launch = mistakes::gin_early::args(&dev, &source, &target, &out);
        // SAFETY: the windows have an element.
        unsafe { launch.grid(1).block(32).launch(&stream)? };
        stream.synchronize()
    });
    check_report("gin_early", &report, &["out.local().store(0, target.local().load(0))"]);
}

#[test]
fn a_source_that_is_written_before_the_flush_is_a_race() {
    let report = report(network(), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (source, target) = (comm.window::<f32>(1)?, comm.window::<f32>(1)?);
        let dev = dev_comm_for_gin(rank)?;
        let launch = mistakes::no_flush::args(&dev, &source, &target);
        // SAFETY: the windows have an element.
        unsafe { launch.grid(1).block(32).launch(&stream)? };
        stream.synchronize()
    });
    check_report("no_flush", &report, &["source.local().store(0, 0.0)"]);
}

#[test]
fn a_barrier_that_a_rank_does_not_reach_is_a_deadlock() {
    let report = report(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        mistakes::deadlock::args(&dev).grid(1).block(32).launch(&stream)?;
        stream.synchronize()
    });
    check_report("deadlock", &report, &["barrier.sync(MemoryOrder::Release)"]);
}

#[test]
fn a_panic_names_its_thread() {
    let report = report(Simulation::new(1), |rank| {
        let stream = rank.stream()?;
        let buffer = || SymmetricBuffer::<f32>::new(rank.library(), rank.context(), 64);
        let (x, out) = (buffer()?, buffer()?);
        x.fill_bytes(0)?;
        // SAFETY: nothing writes x, and out has an element for each thread.
        unsafe { mistakes::panic::args(&x, &out).grid(1).block(64).launch(&stream)? };
        stream.synchronize()
    });
    check_report("panic", &report, &["assert!(i < 40"]);
}

/// The program runs in a process of its own, whose output is read.
#[test]
fn the_first_program_prints_what_the_chapter_says() {
    let program = env!("CARGO_BIN_EXE_normalize");
    let ran = Command::new(program).env("DEVCOMM_SIMULATE", "4").output().unwrap();
    let (out, errors) = (String::from_utf8(ran.stdout).unwrap(), ran.stderr);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&errors));
    // The elements of the ranks are 1, 2, 3 and 4: their squares are 1, 4, 9 and 16 thirtieths.
    for (rank, share) in [(0, "0.033"), (1, "0.133"), (2, "0.300"), (3, "0.533")] {
        let line = format!("rank {rank}: its part of the length squared is {share}");
        assert!(out.contains(&line), "{out}");
    }
}

#[test]
fn the_first_program_refuses_ranks_that_do_not_reach_each_other() {
    let program = env!("CARGO_BIN_EXE_normalize");
    let ran = Command::new(program).env("DEVCOMM_SIMULATE", "4,team=2").output().unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && ran.stdout.is_empty(), "{errors}");
    assert!(errors.contains("ranks 0, 1") && errors.contains("ranks 2, 3"), "{errors}");
}

#[test]
fn a_kernel_prints_from_each_rank_and_block() {
    const PRINTS: &str = "DEVCOMM_GUIDE_PRINTS";
    if std::env::var_os(PRINTS).is_none() {
        // The test runs again as a process of its own, whose output is read.
        let mut this = Command::new(std::env::current_exe().unwrap());
        this.args(["--exact", "a_kernel_prints_from_each_rank_and_block", "--nocapture"]);
        let ran = this.env(PRINTS, "1").output().unwrap();
        let out = String::from_utf8_lossy(&ran.stdout);
        for (rank, block) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert!(out.contains(&format!("rank {rank} block {block}: x is 1.5\n")), "{out}");
        }
        return;
    }
    let world = World::simulated(2).unwrap();
    let ran = world.run(|rank| {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        debugging::hello::args(&dev, 1.5).grid(2).block(32).launch(&stream)?;
        stream.synchronize()
    });
    ran.unwrap();
}
