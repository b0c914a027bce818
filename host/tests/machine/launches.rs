//! Tests of what a launch checks about a kernel's arguments.

use cuda_std::prelude::*;
use devcomm_host::{
    CommConfig, Context, DevCommRequirements, DevCommResource, Error, LaunchError, LaunchRefusal,
    Result, WindowFlags,
};
use devcomm_types::{Kernel, Launch, LaunchArgs};
use nccl_device::{DevComm, Window};

use crate::kernels::{NO_PTX, meet};
use crate::support::ranks;

/// Stores the window's device-side length to its first `count` elements.
#[kernel(requires(count <= window.len(), count > 0))]
fn note_len(comm: DevComm, window: Window<u64>, count: usize) {
    let _ = comm.rank();
    for i in thread::grid_strided(count) {
        // SAFETY: the launch checks the count.
        unsafe { window.local().store(i, window.len() as u64) };
    }
}

/// Increments elements, one by the thread that has read it.
#[kernel(in_place, requires(to.len() <= from.len()))]
fn increment(from: Window<u64>, to: Window<u64>) {
    for i in thread::grid_strided(to.len()) {
        // SAFETY: the launch compares the lengths, and each rank accesses its own part.
        unsafe { to.local().store(i, from.local().load(i) + 1) };
    }
}

/// Copies elements from the next rank.
#[kernel(requires(to.len() <= from.len()))]
fn copy_from_next(comm: DevComm, from: Window<u64>, to: Window<u64>) {
    for i in thread::grid_strided(to.len()) {
        let next = (comm.rank() + 1) % comm.n_ranks();
        // SAFETY: the launch compares the lengths.
        unsafe { to.local().store(i, from.lsa(next).load(i)) };
    }
}

fn dev(rank: &devcomm_host::Rank) -> Result<DevCommResource> {
    rank.load(&NO_PTX)?;
    rank.communicator()?.create_dev_comm(DevCommRequirements::new())
}

fn refusal(result: Result<()>) -> LaunchRefusal {
    match result {
        Err(Error::Launch(LaunchError::Refused { kernel, refusal })) => {
            assert!(["note_len", "copy_from_next"].contains(&kernel), "{kernel}");
            refusal
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn kernels_get_the_smallest_length_and_the_host_knows_every_ranks() {
    ranks(3, |rank| {
        let (me, stream, dev) = (rank.rank(), rank.stream()?, dev(rank)?);
        let window = rank.communicator()?.window::<u64>(10 + me)?;
        assert_eq!((window.len(), window.min_len()), (10 + me, 10));
        assert_eq!([0, 1, 2, 3].map(|r| window.len_of(r)), [Some(10), Some(11), Some(12), None]);
        note_len::args(&dev, &window, 10).grid(1).block(32).launch(&stream)?;
        let mut lens = vec![0; 10 + me];
        stream.copy_to_host(&window, &mut lens)?;
        assert!(lens[..10] == [10; 10] && lens[10..].iter().all(|len| *len == 0), "{lens:?}");
        rank.barrier()
    });
}

#[test]
fn a_launch_that_does_not_meet_the_kernels_conditions_is_refused_with_the_numbers() {
    ranks(2, |rank| {
        let (stream, dev) = (rank.stream()?, dev(rank)?);
        let window = rank.communicator()?.window::<u64>(10 + rank.rank())?;
        let launch = |count| note_len::args(&dev, &window, count).grid(1).block(32).launch(&stream);
        let refused = refusal(launch(11)).to_string();
        assert_eq!(refused, "it requires `count <= window.len()`, but these are 11 and 10");
        let refused = refusal(launch(0)).to_string();
        assert_eq!(refused, "it requires `count > 0`, but these are 0 and 0");
        let unset = note_len::args(&dev, &window, 1).grid(0).block(32).launch(&stream);
        assert!(refusal(unset).to_string().contains("set both by `grid` and `block`"));
        launch(10)?;
        stream.synchronize()
    });
}

#[test]
fn a_launch_of_more_blocks_than_barriers_is_refused_before_it_runs() {
    ranks(2, |rank| {
        rank.load(&NO_PTX)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        for barriers in 0..=2 {
            let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(barriers))?;
            // SAFETY: both ranks launch it, or none.
            let launched = unsafe { meet::args(&dev, 0).grid(2).block(32).launch(&stream) };
            match launched {
                Err(Error::Launch(LaunchError::Refused { kernel: "meet", refusal })) => {
                    let barriers = u64::from(barriers);
                    assert_eq!(refusal, LaunchRefusal::TooFewBarriers { blocks: 2, barriers });
                    assert!(barriers < 2);
                }
                launched => assert_eq!(launched.map(|()| barriers)?, 2),
            }
            stream.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn a_safe_launch_takes_only_what_fits_each_other() {
    ranks(2, |rank| {
        let (stream, dev) = (rank.stream()?, dev(rank)?);
        let window = rank.communicator()?.window::<u64>(4)?;
        let other_window = rank.new_communicator(&CommConfig::new())?.window::<u64>(4)?;
        let launch = note_len::args(&dev, &other_window, 4).grid(1).block(32);
        assert_eq!(refusal(launch.launch(&stream)), LaunchRefusal::MixedCommunicators);
        let bare = window.device_window()?;
        let launch = note_len::args(&dev, bare, 4).grid(1).block(32);
        assert_eq!(refusal(launch.launch(&stream)), LaunchRefusal::UncheckedWindow);
        // SAFETY: the window is of the same communicator, and has the elements in both ranks.
        unsafe { launch.into_unsafe().launch(&stream)? };
        stream.synchronize()?;
        rank.barrier()
    });
}

#[test]
fn a_safe_launch_takes_nothing_of_another_context() {
    ranks(1, |rank| {
        let (window, dev) = (rank.communicator()?.window::<u64>(4)?, dev(rank)?);
        let other = Context::new(rank.device())?;
        other.load(&NO_PTX)?;
        let launch = || note_len::args(&dev, &window, 4).grid(1).block(32);
        assert_eq!(refusal(launch().launch(&other.stream()?)), LaunchRefusal::OtherContext);
        launch().launch(&rank.stream()?)?;
        rank.stream()?.synchronize()
    });
}

#[test]
fn a_safe_launch_does_not_take_the_same_memory_in_two_windows() {
    ranks(2, |rank| {
        let (comm, stream, dev) = (rank.communicator()?, rank.stream()?, dev(rank)?);
        let window = comm.window::<u64>(4)?;
        let same_memory = comm.register_window(&window, WindowFlags::default())?;
        let other = comm.window::<u64>(4)?;
        let launch = |from, to| copy_from_next::args(&dev, from, to).grid(1).block(32);
        for (from, to) in [(&window, &window), (&same_memory, &window), (&window, &same_memory)] {
            let refused = refusal(launch(from, to).launch(&stream));
            assert_eq!(refused, LaunchRefusal::OverlappingWindows);
        }
        launch(&window, &other).launch(&stream)?;
        increment::args(&other, &other).grid(1).block(32).launch(&stream)?;
        stream.synchronize()?;
        rank.barrier()
    });
}

#[test]
fn a_kernel_is_launched_after_its_set_was_loaded() {
    ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let window = comm.window::<u64>(4)?;
        let launch = || note_len::args(&dev, &window, 4).grid(1).block(32).launch(&stream);
        let error = launch().unwrap_err().to_string();
        assert!(error.contains("`note_len`; none is loaded") && error.contains("Rank::load"));
        rank.load(&NO_PTX)?;
        rank.load(&NO_PTX)?;
        launch()?;
        stream.synchronize()
    });
}

#[test]
fn code_that_is_generic_over_kernels_launches_them_by_their_type() {
    fn launch<K: Kernel, A: LaunchArgs<K::Args>>(args: A) -> Launch<K, A> {
        K::with_args(args).grid(1).block(32)
    }
    ranks(1, |rank| {
        let (stream, dev) = (rank.stream()?, dev(rank)?);
        let window = rank.communicator()?.window::<u64>(4)?;
        // SAFETY: the kernel only notes the length.
        unsafe { launch::<note_len, _>((&dev, &window, 4)).launch(&stream)? };
        stream.synchronize()
    });
}
