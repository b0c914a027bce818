//! Tests of windows and registered buffers: registration, addresses, and closing.

mod interop;

use devcomm::{
    Buffer, CommConfig, Context, DevCommRequirements, DeviceSlice, Error, KERNELS, LaunchError,
    LaunchRefusal, Rank, ReduceOp, StateError, SymmetricBuffer, Window, WindowFlags, group,
    kernels,
};
use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::require_works;

const COUNT: usize = 1000;

/// Returns the element `i` of rank `rank`.
fn value(rank: usize, i: usize) -> u64 {
    (rank * 1_000_000 + i) as u64
}

fn values(rank: usize, len: usize) -> Vec<u64> {
    (0..len).map(|i| value(rank, i)).collect()
}

/// Returns the first `len` elements at an address.
fn read(context: &Context, address: u64, len: usize) -> Result<Vec<u64>, Error> {
    // SAFETY: the callers pass an address in a live window, where at least `len` elements are
    // mapped.
    let memory = unsafe { DeviceSlice::<u64>::from_raw_parts(context, address, len) };
    let mut read = vec![0; len];
    memory.copy_to_host(&mut read)?;
    Ok(read)
}

fn invalid<T: std::fmt::Debug>(result: Result<T, Error>, word: &str) {
    match result {
        Err(Error::InvalidInput { what }) => assert!(what.contains(word), "{what}"),
        other => panic!("expected a refusal that says {word:?}, got {other:?}"),
    }
}

/// NCCL returns the same address of a peer's memory by LSA rank and by rank; the peer's data is at
/// that address.
fn addresses_lead_to_peers_memory(rank: &Rank) -> Result<(), Error> {
    let (comm, me, n) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    let window = comm.window::<u64>(COUNT)?;
    window.copy_from_host(&values(me, COUNT))?;
    assert_eq!(window.user_pointer()?, window.device_address());
    rank.barrier()?;
    for peer in 0..n {
        let address = window.lsa_pointer(peer, 0)?;
        assert_eq!(window.peer_pointer(peer, 0)?, Some(address));
        for index in [1, COUNT - 1] {
            let further = address + (index * size_of::<u64>()) as u64;
            assert_eq!(window.lsa_pointer(peer, index)?, further);
            assert_eq!(window.peer_pointer(peer, index)?, Some(further));
        }
        assert_eq!(read(rank.context(), address, COUNT)?, values(peer, COUNT), "rank {peer}'s");
    }
    let multimem = window.lsa_multimem_pointer(0)?;
    assert!(multimem.is_none() || comm.properties()?.multimem);
    if let Some(address) = multimem {
        assert_eq!(window.lsa_multimem_pointer(1)?, Some(address + size_of::<u64>() as u64));
    }

    invalid(window.lsa_pointer(me, COUNT), "element 1000");
    invalid(window.peer_pointer(me, usize::MAX), "element");
    invalid(window.lsa_multimem_pointer(COUNT), "element 1000");
    invalid(window.lsa_pointer(n, 0), "LSA rank");
    invalid(window.peer_pointer(n, 0), "rank");
    // No rank closes its window while a peer reads it.
    rank.barrier()
}

#[test]
fn addresses_lead_to_peers_memory_on_two_gpus() {
    on_gpus("addresses_lead_to_peers_memory_on_two_gpus", 2, addresses_lead_to_peers_memory);
}

#[test]
fn addresses_lead_to_peers_memory_on_four_gpus() {
    on_gpus("addresses_lead_to_peers_memory_on_four_gpus", 4, addresses_lead_to_peers_memory);
}

#[test]
fn ranks_may_have_windows_of_different_lengths() {
    on_gpus("ranks_may_have_windows_of_different_lengths", 2, |rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        // The lengths are less than a page, and several of the largest pages.
        let lens = [COUNT, 1 << 20];
        let window = comm.window::<u64>(lens[me])?;
        window.copy_from_host(&values(me, lens[me]))?;
        rank.barrier()?;
        let peer = 1 - me;
        let address = window.lsa_pointer(peer, 0)?;
        assert_eq!(read(rank.context(), address, lens[peer])?, values(peer, lens[peer]));
        // The peer's length counts, be it the longer or the shorter one.
        let last = address + ((lens[peer] - 1) * size_of::<u64>()) as u64;
        assert_eq!(window.lsa_pointer(peer, lens[peer] - 1)?, last);
        assert_eq!(window.peer_pointer(peer, lens[peer] - 1)?, Some(last));
        let what = format!("window of length {} on rank {peer}", lens[peer]);
        invalid(window.lsa_pointer(peer, lens[peer]), &what);
        invalid(window.peer_pointer(peer, lens[peer]), &what);
        rank.barrier()
    });
}

#[test]
fn flags_are_kept_and_exclusive_ones_refused() {
    on_gpus("flags_are_kept_and_exclusive_ones_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<u32>(COUNT)?;
        for flags in [
            WindowFlags::empty(),
            WindowFlags::COLL_SYMMETRIC,
            WindowFlags::COLL_SYMMETRIC | WindowFlags::STRICT_ORDERING,
        ] {
            let window = comm.register_window(&memory, flags)?;
            assert_eq!(window.flags(), flags);
            assert!(window.is_valid());
            assert_eq!((window.len(), window.byte_len()), (COUNT, 4 * COUNT));
            comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
            stream.synchronize()?;
        }
        for other in [WindowFlags::GIN_ONLY, WindowFlags::CFT_COUNTED] {
            let flags = WindowFlags::COLL_SYMMETRIC | other;
            invalid(comm.register_window(&memory, flags), "excludes");
        }
        require_works(comm, &stream)
    });
}

#[test]
fn several_windows_are_registered_in_one_group() {
    on_gpus("several_windows_are_registered_in_one_group", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffers = (0..4).map(|_| comm.mem_alloc::<f32>(COUNT));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let register = |buffer: &SymmetricBuffer<f32>| {
            comm.register_window(buffer, WindowFlags::COLL_SYMMETRIC)
        };
        let windows = group(|_| {
            let windows = buffers.iter().map(register).collect::<Result<Vec<_>, _>>()?;
            for window in &windows {
                assert!(!window.is_valid());
                assert!(matches!(
                    window.device_window(),
                    Err(Error::State(StateError::InGroup { .. }))
                ));
                assert!(matches!(
                    window.user_pointer(),
                    Err(Error::State(StateError::InGroup { .. }))
                ));
            }
            Ok::<_, Error>(windows)
        })?;
        assert!(windows.iter().all(Window::is_valid));
        for (window, buffer) in windows.iter().zip(&buffers) {
            assert_eq!(window.user_pointer()?, buffer.device_address());
        }
        drop(buffers);
        windows[0].copy_from_host(&[1.0; COUNT])?;
        comm.all_reduce(&windows[0], &windows[3], ReduceOp::Sum, &stream)?;
        let mut got = vec![0.0; COUNT];
        windows[3].copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 2.0));

        // A group that fails registers nothing.
        let memory = comm.mem_alloc::<f32>(COUNT)?;
        let mut dropped = None;
        let failed = group(|_| {
            dropped = Some(register(&memory)?);
            Err::<(), _>(Error::InvalidInput { what: "changed its mind".to_owned() })
        });
        assert!(failed.is_err());
        let dropped = dropped.unwrap();
        assert!(!dropped.is_valid());
        assert!(matches!(dropped.device_window(), Err(Error::State(StateError::Closed { .. }))));
        dropped.close()?;
        assert!(register(&memory)?.is_valid());
        require_works(comm, &stream)
    });
}

#[test]
fn one_buffer_is_a_window_of_two_communicators() {
    on_gpus("one_buffer_is_a_window_of_two_communicators", 2, |rank| {
        let first = rank.communicator()?;
        let (second, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        let memory = first.mem_alloc::<u64>(COUNT)?;
        let flags = WindowFlags::COLL_SYMMETRIC;
        let (a, b) =
            (first.register_window(&memory, flags)?, second.register_window(&memory, flags)?);
        memory.copy_from_host(&values(rank.rank(), COUNT))?;
        rank.barrier()?;
        let peer = 1 - rank.rank();
        for window in [&a, &b] {
            assert_eq!(window.user_pointer()?, memory.device_address());
            let address = window.lsa_pointer(peer, 0)?;
            assert_eq!(read(rank.context(), address, COUNT)?, values(peer, COUNT));
        }
        rank.barrier()?;
        // Closing one window does not close the other.
        a.close()?;
        assert!(!a.is_valid() && b.is_valid());
        second.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        let sums: Vec<u64> = (0..COUNT).map(|i| value(0, i) + value(1, i)).collect();
        assert_eq!(read(rank.context(), memory.device_address(), COUNT)?, sums);
        second.destroy()?;
        assert!(!b.is_valid());
        require_works(first, &stream)
    });
}

#[test]
fn a_closed_window_is_refused_everywhere_but_keeps_its_memory() {
    on_gpus("a_closed_window_is_refused_everywhere_but_keeps_its_memory", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (window, live) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        rank.load(&KERNELS)?;
        window.copy_from_host(&[5.0; COUNT])?;
        window.close()?;
        window.close()?;
        assert!(!window.is_valid());
        assert!(matches!(window.device_window(), Err(Error::State(StateError::Closed { .. }))));
        assert!(matches!(window.lsa_pointer(0, 0), Err(Error::State(StateError::Closed { .. }))));
        let sum = kernels::lsa_allreduce::args(&dev_comm, &live, &window, COUNT);
        let refused = sum.grid(1).block(128).launch(&stream);
        let refusal = match refused {
            Err(Error::Launch(LaunchError::Refused { refusal, .. })) => refusal,
            other => panic!("expected a refusal, got {other:?}"),
        };
        assert!(matches!(refusal, LaunchRefusal::Closed { .. }), "{refusal}");

        let mut kept = vec![0.0; COUNT];
        window.copy_to_host(&mut kept)?;
        assert!(kept.iter().all(|&x| x == 5.0));
        comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        window.copy_to_host(&mut kept)?;
        assert!(kept.iter().all(|&x| x == 10.0));
        require_works(comm, &stream)
    });
}

#[test]
fn memory_that_cannot_be_a_window_is_refused() {
    on_gpus("memory_that_cannot_be_a_window_is_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let flags = WindowFlags::COLL_SYMMETRIC;
        let memory = comm.mem_alloc::<f32>(4096)?;
        invalid(comm.register_window(&memory.slice(1..)?, flags), "4096");
        invalid(comm.register_window(&memory.slice(..0)?, flags), "element");
        let other = Context::new(rank.device())?;
        let foreign: SymmetricBuffer<f32> = SymmetricBuffer::new(rank.library(), &other, 8)?;
        invalid(comm.register_window(&foreign, flags), "context");
        invalid(comm.register_buffer(&foreign), "context");
        invalid(comm.register_buffer(&memory.slice(3..3)?), "0 elements");
        // A slice that begins at a page can be registered.
        assert!(comm.register_window(&memory.slice(1024..)?, flags)?.is_valid());
        require_works(comm, &stream)
    });
}

#[test]
fn registered_buffers_take_part_in_collectives() {
    on_gpus("registered_buffers_take_part_in_collectives", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        const LARGE: usize = 1 << 20;
        let (send, recv) = (comm.mem_alloc::<f32>(LARGE)?, comm.mem_alloc::<f32>(2 * LARGE)?);
        let registered = [comm.register_buffer(&send)?, comm.register_buffer(&recv)?];
        assert_eq!(registered[0].byte_len(), 4 * LARGE);
        send.copy_from_host(&vec![rank.rank() as f32 + 1.0; LARGE])?;
        comm.all_reduce(&send, &recv.slice(..LARGE)?, ReduceOp::Sum, &stream)?;
        let mut got = vec![0.0; 2 * LARGE];
        recv.copy_to_host(&mut got)?;
        assert!(got[..LARGE].iter().all(|&x| x == 3.0));
        comm.all_gather(&send, &recv, &stream)?;
        recv.copy_to_host(&mut got)?;
        assert!(got[..LARGE].iter().all(|&x| x == 1.0) && got[LARGE..].iter().all(|&x| x == 2.0));
        for registered in &registered {
            assert!(registered.is_valid());
            registered.close()?;
            registered.close()?;
            assert!(!registered.is_valid());
            assert!(matches!(registered.handle(), Err(Error::State(StateError::Closed { .. }))));
        }
        comm.all_gather(&send, &recv, &stream)?;
        stream.synchronize()?;
        require_works(comm, &stream)
    });
}
