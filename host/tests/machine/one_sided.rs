//! Tests of host puts and signals: the NCCL calls, the results, and arguments that are refused.

use devcomm_host::{Buffer, CommConfig, Error, NcclError, Signal, WaitSignalDesc, group};

use crate::support::{
    assert_closed, assert_invalid, calls, contents, logged, makes_no_calls, ranks, world,
};

#[test]
fn a_put_reaches_the_peers_window_at_the_offset_of_its_element() {
    ranks(2, |rank| {
        let (comm, stream, peer) = (rank.communicator()?, rank.stream()?, 1 - rank.rank());
        let (from, to) = (comm.window::<f64>(4)?, comm.window::<f64>(8)?);
        let own = 10.0 * (1 + rank.rank()) as f64;
        from.copy_from_host(&[0.0, own, own + 1.0, 0.0])?;
        let log = calls(rank, || {
            comm.put_signal(&from.slice(1..3)?, &to, 5, Signal::to(peer), &stream)?;
            comm.wait_signal(&[WaitSignalDesc::from(peer)], &stream)
        })?;
        // Lengths are in elements, offsets in bytes.
        let put = format!("ncclPutSignal 2 type 8 peer {peer} offset 40 signal 0 context 0");
        let wait = format!("ncclWaitSignal 1 from peer {peer} signal 0 context 0");
        assert_eq!(log, [put, wait]);
        stream.synchronize()?;
        let theirs = 10.0 * (1 + peer) as f64;
        assert_eq!(contents(&to), [0.0, 0.0, 0.0, 0.0, 0.0, theirs, theirs + 1.0, 0.0]);
        Ok(())
    });
}

#[test]
fn a_wait_counts_the_signals_of_each_rank_index_and_context() {
    let config = CommConfig::new().num_rma_ctx(3).num_rma_sig(8);
    ranks(3, |rank| {
        let (comm, stream, me) = (rank.new_communicator(&config)?, rank.stream()?, rank.rank());
        drop(comm.window::<f32>(1)?);
        if me == 0 {
            let from_1 =
                WaitSignalDesc { index: 7, context: 2, ..WaitSignalDesc::from(1).count(3) };
            let (done, log) =
                logged(rank, || comm.wait_signal(&[from_1, WaitSignalDesc::from(2)], &stream));
            done?;
            let [first, second] =
                ["3 from peer 1 signal 7 context 2", "1 from peer 2 signal 0 context 0"];
            assert_eq!(log, [format!("ncclWaitSignal {first}, {second}")]);
        } else {
            let to = Signal { peer: 0, index: 7, context: 2 };
            let to = if me == 1 { to } else { Signal::to(0) };
            // Rank 1 sends two of its three signals, and rank 2 its only one.
            for _ in 0..[1, 2][me % 2] {
                comm.signal(to, &stream)?;
            }
        }
        rank.barrier()?;
        // Rank 1 has not sent the last of its three signals yet.
        assert!(me != 0 || !stream.is_idle()?);
        rank.barrier()?;
        if me == 1 {
            comm.signal(Signal { peer: 0, index: 7, context: 2 }, &stream)?;
        }
        stream.synchronize()
    });
}

#[test]
fn puts_beyond_a_window_and_targets_that_are_not_there_are_refused_before_nccl_is_called() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let other = rank.new_communicator(&CommConfig::new())?;
        let (from, to) = (comm.window::<f32>(4)?, comm.window::<f32>(8)?);
        let foreign = other.window::<f32>(8)?;
        // One element longer in rank 1 than in rank 0.
        let uneven = comm.window::<f32>(3 + rank.rank())?;
        makes_no_calls(rank, || {
            assert_invalid(comm.put_signal(&from, &uneven, 0, Signal::to(0), &stream));
            let put = |at, signal| comm.put_signal(&from, &to, at, signal, &stream);
            assert_invalid(put(5, Signal::to(1)));
            assert_invalid(put(usize::MAX - 1, Signal::to(1)));
            assert_invalid(put(0, Signal::to(2)));
            assert_invalid(put(0, Signal { index: u32::MAX, ..Signal::to(1) }));
            assert_invalid(put(0, Signal { context: 1 << 31, ..Signal::to(1) }));
            assert_invalid(comm.put_signal(&from, &foreign, 0, Signal::to(1), &stream));
            assert_invalid(comm.signal(Signal::to(2), &stream));
            assert_invalid(comm.wait_signal(&[], &stream));
            assert_invalid(comm.wait_signal(&[WaitSignalDesc::from(2)], &stream));
            assert_invalid(comm.wait_signal(&[WaitSignalDesc::from(1).count(u32::MAX)], &stream));
        });
        to.close()?;
        assert_closed(comm.put_signal(&from, &to, 0, Signal::to(1), &stream));
        Ok(())
    });
}

#[test]
fn a_put_in_a_group_is_made_at_its_end() {
    ranks(2, |rank| {
        let (comm, stream, peer) = (rank.communicator()?, rank.stream()?, 1 - rank.rank());
        let (from, to) = (comm.window::<f32>(4)?, comm.window::<f32>(4)?);
        from.copy_from_host(&[7.0; 4])?;
        let log = calls(rank, || {
            group(|_| {
                comm.put_signal(&from, &to, 0, Signal::to(peer), &stream)?;
                comm.wait_signal(&[WaitSignalDesc::from(peer)], &stream)?;
                // The group keeps the window registered.
                drop(from);
                Ok::<_, Error>(())
            })
        })?;
        let at = |call: &str| log.iter().position(|line| line.starts_with(call)).unwrap();
        assert!(at("ncclGroupEnd") < at("ncclCommWindowDeregister"), "{log:?}");
        stream.synchronize()?;
        assert_eq!(contents(&to), [7.0; 4]);
        Ok(())
    });
}

#[test]
fn endpoints_in_another_ranks_window_are_limited_by_its_length() {
    let asked = world(2).run(|rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let (lengths, peer) = ([8, 4], 1 - me);
        let window = comm.window::<f32>(lengths[me])?;
        let (team, last) = (comm.team_world()?, lengths[peer] - 1);
        assert_invalid(window.peer_endpoint(peer, last + 1));
        assert_invalid(window.cft_endpoint(team, peer, last + 1));
        // These reach NCCL, which has no endpoints here.
        for asked in [window.peer_endpoint(peer, last), window.cft_endpoint(team, peer, last)] {
            assert!(matches!(asked, Err(Error::Nccl(NcclError::Failed { .. }))), "{asked:?}");
        }
        Ok::<_, Error>(())
    });
    asked.unwrap();
}
