//! Tests of the kernels that use the network (GIN), with random sizes, grids and blocks; every
//! element is checked.

use std::iter::repeat_n;
use std::time::Duration;

use devcomm::{
    DevCommRequirements, DevCommResource, Error, GinConnectionType, KERNELS, Kernel, LaunchConfig,
    Rank, Simulation, Stream, device, kernels,
};
use devcomm_examples as example;
use devcomm_testing::machines::Gpus;
use devcomm_testing::messages::{self, Datum, datum, sent};
use devcomm_testing::numbers::{self, Number, checksum, inputs};
use devcomm_testing::shapes::Shapes;
use half::{bf16, f16};

/// Simulated worlds: the number of GPUs, and the size of each LSA team.
const WORLDS: [(usize, usize); 9] =
    [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (4, 4), (6, 3), (6, 2)];
/// Maximum number of blocks, each with its own barrier and signal; and a smaller number of GIN
/// contexts, so that some blocks share one.
const BLOCKS: usize = 8;
const CONTEXTS: u32 = 5;
/// Maximum rounds of a ping-pong.
const ROUNDS: usize = 6;
/// The limit of a kernel's time. Beyond it the error says what its blocks wait for.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `body` on 2 and on 4 real GPUs; without them, in every simulated world with ten seeds, and
/// in small worlds also with a possible thread switch at every memory access.
fn in_every_world(
    name: &str,
    connection: GinConnectionType,
    body: impl Fn(&Rank, u64) -> Result<(), Error> + Sync,
) {
    if Gpus::are_real() {
        for n in [2, 4] {
            let gpus = Gpus::new(n).with_gin(connection);
            gpus.run_seeds(&format!("{name} on {n}"), 7..8, &body); // one seed
        }
        return;
    }
    for (i, (gpus, team)) in (0..).zip(WORLDS) {
        let simulation = Simulation::new(gpus).team_size(team);
        let seeds = 1000 * i..1000 * i + 10;
        Gpus::from(simulation.clone()).run_seeds(name, seeds, &body);
        // Preemption is slow, so it has one seed.
        if gpus <= 3 {
            Gpus::from(simulation.preempt(true)).run_seeds(name, i..i + 1, &body);
        }
    }
}

/// Limits of the random launches.
struct Limits {
    launches: usize,
    elements: usize,
    threads: usize,
}

impl Limits {
    /// Limits windows to `elements` on GPUs, and to `simulated` elements on simulated ones. Several
    /// launches share a device communicator: signals and barriers continue from one to the next.
    fn new(rank: &Rank, elements: usize, simulated: usize) -> Self {
        match rank.is_simulated() {
            true => Self { launches: 3, elements: simulated, threads: 72 },
            false => Self { launches: 100, elements, threads: 512 },
        }
    }

    /// Returns a random number of elements, and a random launch configuration.
    fn random(&self, shapes: &mut Shapes) -> (usize, LaunchConfig) {
        let (blocks, threads) = (shapes.up_to(BLOCKS) as u32, shapes.up_to(self.threads) as u32);
        (shapes.size(self.elements), LaunchConfig::new(blocks, threads))
    }
}

fn requirements(connection: GinConnectionType) -> DevCommRequirements {
    let requirements = DevCommRequirements::new().gin_connection(connection);
    requirements.gin_contexts(CONTEXTS).gin_signals(BLOCKS as u32)
}

fn finish(rank: &Rank, stream: &Stream) -> Result<(), Error> {
    stream.synchronize_within(LIMIT)?;
    rank.barrier()
}

#[test]
fn every_throw_of_a_ping_pong_arrives() {
    let name = "every_throw_of_a_ping_pong_arrives";
    in_every_world(name, GinConnectionType::Full, |rank, seed| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let dev_comm = comm.create_dev_comm(requirements(GinConnectionType::Full))?;
        let (limits, mut shapes) = (Limits::new(rank, 1 << 16, 1 << 9), Shapes::new(seed));
        let slots = BLOCKS * ROUNDS;
        let room = slots * limits.elements + 1;
        let (send, recv) = (comm.window::<u8>(room)?, comm.window::<u8>(room)?);
        let nanos = comm.mem_alloc::<u64>(slots)?;
        rank.load(&KERNELS)?;
        let stream = rank.stream()?;
        let mut got = vec![0; room];
        for _ in 0..limits.launches {
            let ((count, config), rounds) = (limits.random(&mut shapes), shapes.up_to(ROUNDS));
            let (len, salt) = (config.grid.x as usize * rounds * count, shapes.u64(..));
            // At the end, both ranks of a pair have the even rank's message.
            let message: Vec<u8> = (0..len).map(|i| datum(salt, me & !1, i)).collect();
            send.copy_from_host(&message)?;
            recv.fill_bytes(0xff)?;
            rank.barrier()?;
            // SAFETY: windows and times have room for every round of every block in every rank, and
            // nothing else accesses them until the barrier in `finish`.
            unsafe {
                let rounds = rounds as u32;
                let ping_pong =
                    kernels::gin_put_signal::args(&dev_comm, &send, &recv, count, rounds, &nanos);
                ping_pong.config(config).launch(&stream)?;
            }
            finish(rank, &stream)?;
            recv.copy_to_host(&mut got)?;
            let arrived = if me ^ 1 < rank.n_ranks() { &message[..] } else { &[] };
            let wanted = arrived.iter().copied().chain(repeat_n(0xff, room - arrived.len()));
            let wrong = got.iter().zip(wanted).filter(|(got, wanted)| **got != *wanted).count();
            assert_eq!(wrong, 0, "{rank:?}: {rounds} rounds of {count} bytes, {config:?}");
        }
        Ok(())
    });
}

type AllToAll<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

fn all_to_alls<T, K>(rank: &Rank, dev_comm: &DevCommResource, seed: u64) -> Result<(), Error>
where
    T: Datum,
    K: Kernel<Args = AllToAll<T>>,
{
    let (comm, n_ranks) = (rank.communicator()?, rank.n_ranks());
    let (limits, mut shapes) = (Limits::new(rank, 1 << 18, 1 << 9), Shapes::new(seed));
    rank.load(&example::KERNELS)?;
    let stream = rank.stream()?;
    let room = limits.elements * n_ranks;
    let (send, recv) = (comm.window::<T>(room)?, comm.window::<T>(room)?);
    let mut got = vec![T::of(0); room];
    for _ in 0..limits.launches {
        let ((count, config), salt) = (limits.random(&mut shapes), shapes.u64(..));
        send.copy_from_host(&sent::<T>(salt, rank.rank(), n_ranks, count))?;
        recv.fill_bytes(0xff)?;
        // SAFETY: the windows have room for the elements, and live until the barrier in `finish`.
        // The kernel begins with a barrier of all ranks.
        unsafe { K::with_args((dev_comm, &send, &recv, count)).config(config).launch(&stream)? };
        finish(rank, &stream)?;
        recv.copy_to_host(&mut got)?;
        let wrong = messages::count_wrong(salt, rank.rank(), n_ranks, count, &got);
        assert_eq!(wrong, 0, "{rank:?}: {count} x {}, {config:?}", T::NAME);
    }
    Ok(())
}

#[test]
fn every_message_of_an_all_to_all_arrives() {
    let name = "every_message_of_an_all_to_all_arrives";
    in_every_world(name, GinConnectionType::Full, |rank, seed| {
        let requirements = requirements(GinConnectionType::Full).world_gin_barriers(BLOCKS as u32);
        let dev_comm = rank.communicator()?.create_dev_comm(requirements)?;
        all_to_alls::<u8, example::kernels::gin_alltoall<u8>>(rank, &dev_comm, seed)?;
        all_to_alls::<f32, example::kernels::gin_alltoall<f32>>(rank, &dev_comm, seed)
    });
}

#[test]
fn every_message_of_a_hybrid_all_to_all_arrives() {
    let name = "every_message_of_a_hybrid_all_to_all_arrives";
    in_every_world(name, GinConnectionType::Full, |rank, seed| {
        let requirements = requirements(GinConnectionType::Full).barriers(BLOCKS as u32);
        let dev_comm = rank.communicator()?.create_dev_comm(requirements)?;
        all_to_alls::<u8, example::kernels::hybrid_alltoall<u8>>(rank, &dev_comm, seed)?;
        all_to_alls::<f32, example::kernels::hybrid_alltoall<f32>>(rank, &dev_comm, seed)
    });
}

type AllReduce<T> =
    (device::DevComm, device::Window<T>, device::Window<T>, device::Window<T>, usize);

fn all_reduces<T, K>(rank: &Rank, dev_comm: &DevCommResource, seed: u64) -> Result<(), Error>
where
    T: Number,
    K: Kernel<Args = AllReduce<T>>,
{
    let (comm, n_ranks) = (rank.communicator()?, rank.n_ranks());
    let (limits, mut shapes) = (Limits::new(rank, 1 << 20, 1 << 11), Shapes::new(seed));
    rank.load(&example::KERNELS)?;
    let stream = rank.stream()?;
    let properties = comm.properties()?;
    let (team, teams) = (properties.lsa_size(), properties.n_lsa_teams);
    let partials = example::kernels::hybrid_allreduce_partials(limits.elements, team, teams);
    let (send, out) = (comm.window::<T>(limits.elements)?, comm.window::<T>(limits.elements)?);
    let partial = comm.window::<T>(partials)?;
    // 16-bit types are rounded twice: a team's partial sums, and the final sums.
    let roundings = if size_of::<T>() < size_of::<f32>() { 2 } else { 1 };
    let untouched = vec![T::nearest(7.0); limits.elements];
    let mut got = untouched.clone();
    for _ in 0..limits.launches {
        let ((count, config), salt) = (limits.random(&mut shapes), shapes.u64(..));
        let recv = if shapes.bool() { &send } else { &out };
        recv.copy_from_host(&untouched)?;
        send.copy_from_host(&inputs::<T>(salt, rank.rank(), count))?;
        // Peers write this rank's window as soon as their kernels begin.
        rank.barrier()?;
        // SAFETY: the windows have room for the elements and their partial sums, and nothing else
        // accesses them until the barrier in `finish`.
        unsafe {
            let args = (dev_comm, &send, recv, &partial, count);
            K::with_args(args).config(config).launch(&stream)?;
        }
        finish(rank, &stream)?;
        recv.copy_to_host(&mut got)?;
        let (sums, after) = got.split_at(count);
        let what = format!("{rank:?}: {count} x {}, {config:?}", T::NAME);
        assert_eq!(numbers::count_wrong(salt, n_ranks, roundings, sums), 0, "{what}");
        assert!(after == &untouched[count..], "{what}: written after the end");
        let all = rank.all_gather(&checksum(sums).to_le_bytes())?;
        assert!(all.iter().all(|other| *other == all[0]), "{what}: the ranks' results differ");
    }
    Ok(())
}

#[test]
fn a_hybrid_all_reduce_sums_over_all_teams() {
    let name = "a_hybrid_all_reduce_sums_over_all_teams";
    in_every_world(name, GinConnectionType::Rail, |rank, seed| {
        let requirements = requirements(GinConnectionType::Rail).barriers(BLOCKS as u32);
        let dev_comm = rank.communicator()?.create_dev_comm(requirements)?;
        all_reduces::<f32, example::kernels::hybrid_allreduce<f32>>(rank, &dev_comm, seed)?;
        all_reduces::<f16, example::kernels::hybrid_allreduce<f16>>(rank, &dev_comm, seed)?;
        all_reduces::<bf16, example::kernels::hybrid_allreduce<bf16>>(rank, &dev_comm, seed)
    });
}
