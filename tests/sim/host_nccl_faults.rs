//! Tests of fault injection, call recording and NCCL's parameters.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

use devcomm_sim::{Effect, Fault, Machine, Simulation};
use devcomm_sys::driver::CUresult;
use devcomm_sys::nccl::RawComm;

use crate::nccl_threads::*;

#[test]
fn faults_come_where_they_were_asked_for_and_calls_are_recorded() {
    let machine = Machine::new(&Simulation::new(2)).unwrap();
    let fault = |function, gpu, effect| Fault { function, gpu, nth: Some(0), effect };
    machine.inject(fault("ncclMemAlloc", Some(1), Effect::Fail(1)));
    machine.inject(fault("ncclCommSplit", None, Effect::Null));
    machine.inject(fault("ncclAllReduce", Some(0), Effect::Later(REMOTE_ERROR)));
    machine.record_calls();
    run_ranks_on(&machine, |rank| {
        let (comm, mut memory) = (rank.init(), null_mut());
        let code = nccl!(mem_alloc(&raw mut memory, 8));
        // Only the call on GPU 1 fails, with code 1.
        assert_eq!(code, rank.me as c_int);
        if rank.me == 1 {
            assert_eq!(rank.last_error(null_mut()), "ncclMemAlloc: injected fault");
        }
        let mut child = 64 as RawComm;
        ok(nccl!(comm_split(comm, 0, 0, &raw mut child, null_mut())));
        let (b, stream) = (rank.filled(&[1.0_f32]), rank.stream());
        ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        assert_eq!(rank.async_error(comm), if rank.me == 0 { REMOTE_ERROR } else { 0 });
        rank.abort(comm);
        child.is_null()
    });
    let calls = machine.calls();
    let of = |gpu| {
        let calls = calls.iter().filter(move |call| call.gpu == Some(gpu));
        calls.map(ToString::to_string).filter(|line| line.starts_with("ncclAllReduce"))
    };
    assert_eq!(of(0).collect::<Vec<_>>(), ["ncclAllReduce 1 type 7 op 0"]);
    let failed = calls.iter().find(|call| call.code == Some(1)).unwrap();
    assert_eq!((failed.function, failed.gpu), ("ncclMemAlloc", Some(1)));
}

#[test]
fn a_call_that_hangs_returns_when_its_gpus_communicator_is_aborted() {
    let machine = Machine::new(&Simulation::new(1)).unwrap();
    let (function, gpu, nth, effect) = ("ncclCommSuspend", Some(0), None, Effect::Hang);
    machine.inject(Fault { function, gpu, nth, effect });
    run_ranks_on(&machine, |rank| {
        let comm = rank.init() as usize;
        std::thread::scope(|scope| {
            let ticket = machine.ticket("aborts");
            scope.spawn(move || {
                let _attached = ticket.attach();
                ok(nccl!(comm_abort(comm as RawComm)));
            });
            let code = nccl!(comm_suspend(comm as RawComm, 1));
            assert_eq!(code, INTERNAL_ERROR);
        });
    });
}

#[test]
fn parameters_are_read_by_name_and_by_handle() {
    let (mut table, mut len, mut value, mut number) = (null_mut(), 0, null(), -1);
    let (mut handle, name) = (null_mut(), c"NCCL_SET_THREAD_NAME");
    ok(nccl!(param_get_all_parameter_keys(&raw mut table, &raw mut len)));
    // SAFETY: the table and its strings are valid until the thread's next call.
    let mut keys = (0..len as usize).map(|i| unsafe { CStr::from_ptr(*table.add(i)) });
    assert!(keys.any(|key| key == name));
    ok(nccl!(param_get_parameter(name.as_ptr(), &raw mut value, &raw mut len)));
    // SAFETY: the text is the simulator's, with a zero at its end.
    assert_eq!((unsafe { CStr::from_ptr(value) }, len), (c"0", 1));
    ok(nccl!(param_bind(&raw mut handle, name.as_ptr())));
    ok(nccl!(param_get_i64(handle, &raw mut number)));
    assert_eq!(number, 0);
    let unknown = nccl!(param_bind(&raw mut handle, c"NCCL_NOTHING".as_ptr()));
    assert_eq!((unknown, handle.is_null()), (INVALID_ARGUMENT, true));
}

#[test]
fn every_function_that_loads_a_module_takes_a_fault_of_its_own_name() {
    let machine = Machine::new(&Simulation::new(1)).unwrap();
    let (gpu, nth, effect) = (None, None, Effect::Fail(2));
    for function in ["cuModuleLoadDataEx", "cuModuleGetFunction"] {
        machine.inject(Fault { function, gpu, nth, effect });
    }
    machine.record_calls();
    let refused = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    run_ranks_on(&machine, |rank| {
        let (mut module, mut function) = (null_mut(), null_mut());
        let (data, none) = (c"PTX".as_ptr().cast(), null_mut());
        let loaded = cuda!(cuModuleLoadDataEx(&raw mut module, data, 0, null_mut(), none));
        let found = cuda!(cuModuleGetFunction(&raw mut function, rank.module, c"k".as_ptr()));
        assert_eq!((loaded, found), (refused, refused));
    });
    let calls: Vec<_> = machine.calls().iter().map(|call| call.function).collect();
    assert!(calls.contains(&"cuModuleLoadDataEx") && calls.contains(&"cuModuleGetFunction"));
}
