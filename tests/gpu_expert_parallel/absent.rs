//! Tests of ranks that are absent.

use devcomm_testing::experts::{Batch, Routing};
use devcomm_testing::machines::on_gpus;

use super::{Memory, WHOLE, checked_step};

/// Some ranks are absent for the others in graphs, and the others for them.
#[test]
fn ranks_may_be_absent_and_come_back() {
    on_gpus("ranks_may_be_absent_and_come_back", 4, |rank| {
        let me = rank.rank();
        let mut batch = Batch::new(528, 8, 3, &[3, 1, 4, 2], 1);
        for memory in Memory::of_each(rank, &batch, 4)? {
            let graph = memory.stream.capture(|| memory.step(batch.tokens[me]))?;
            for (launch, absent) in [&[][..], &[2], &[1, 3], &[], &[0]].into_iter().enumerate() {
                batch.route(Routing::Repeated, launch as u64);
                memory.write(rank, &batch)?;
                let others: Vec<_> = (0..4).filter(|other| *other != me).collect();
                let gone = if absent.contains(&me) { &others } else { absent };
                memory.experts.set_absent(gone, &memory.stream)?;
                for _ in 0..=launch % 2 {
                    graph.launch(&memory.stream)?;
                }
                let left = batch.without(gone);
                memory.check_rows(rank, &left)?;
                memory.check_output(&left.combined(me, None, |_| 1.0))?;
                // All ranks have ended their launches before an absent one comes back.
                rank.barrier()?;
            }
            memory.experts.check()?;
        }
        Ok(())
    });
}

#[test]
fn an_absent_rank_need_not_run() {
    for ranks in [2, 3] {
        on_gpus("an_absent_rank_need_not_run", ranks, |rank| {
            let (me, gone) = (rank.rank(), [1]);
            let tokens: Vec<_> = (0..ranks).map(|rank| rank + 2).collect();
            let batch = Batch::new(264, 2 * ranks, 2, &tokens, 1).routed(Routing::Random, 1);
            for memory in Memory::of_each(rank, &batch, 4)? {
                checked_step(rank, &memory, &batch, WHOLE)?;
                if me == 1 {
                    continue;
                }
                let Memory { experts, stream, rows, output, .. } = &memory;
                experts.set_absent(&gone, stream)?;
                let left = batch.without(&gone);
                for _ in 0..3 {
                    memory.write(rank, &batch)?;
                    experts.start_dispatch(memory.tokens(tokens[me]), stream)?.receive()?;
                    experts.group(rows, stream)?;
                    memory.check_rows(rank, &left)?;
                    experts.start_combine(rows, stream)?.receive(output, None)?;
                    memory.check_output(&left.combined(me, None, |_| 1.0))?;
                }
                experts.check()?;
            }
            Ok(())
        });
    }
}
