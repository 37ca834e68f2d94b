//! Bind groups of operands, each made once: making one takes the host as long as all else of a launch.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use qgemm_hal::HalError;

use crate::families::STORAGE_BUFFERS;
use crate::shared::Shared;

/// All bindings of a kernel, in their order.
pub(crate) type Bindings<'a> = [wgpu::BufferBinding<'a>; STORAGE_BUFFERS as usize];

/// Groups that are kept at most. Who binds other parts of buffers with every launch does not collect them.
const MOST_KEPT: usize = 4096;

/// The groups made so far. They are forgotten with any of their buffers, whose memory they would keep otherwise.
#[derive(Default)]
pub(crate) struct BindGroups {
    made: Mutex<HashMap<[Operand; STORAGE_BUFFERS as usize], wgpu::BindGroup>>,
}

/// What is bound of a buffer.
#[derive(PartialEq, Eq, Hash)]
struct Operand {
    buffer: wgpu::Buffer,
    offset: u64,
    size: Option<wgpu::BufferSize>,
}

impl BindGroups {
    /// Forgets the groups that `buffer` is in.
    pub fn forget(&self, buffer: &wgpu::Buffer) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|operands, _| operands.iter().all(|operand| operand.buffer != *buffer));
    }
}

/// The group of `bindings`. `name` is for debuggers.
pub(crate) fn bind_group(shared: &Shared, name: &str, bindings: Bindings<'_>) -> Result<wgpu::BindGroup, HalError> {
    let operands = bindings.each_ref().map(|b| Operand { buffer: b.buffer.clone(), offset: b.offset, size: b.size });
    let mut made = shared.groups.made.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(group) = made.get(&operands) {
        return Ok(group.clone());
    }
    let mut binding = 0..;
    let entries = bindings.map(|buffer| wgpu::BindGroupEntry {
        binding: binding.next().unwrap_or_default(),
        resource: wgpu::BindingResource::Buffer(buffer),
    });
    let group = shared.scoped("binding the operands of a kernel", || {
        shared.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(name),
            layout: &shared.pipelines.bindings,
            entries: &entries,
        })
    })?;
    if made.len() >= MOST_KEPT {
        made.clear();
    }
    made.insert(operands, group.clone());
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::open_for_test;
    use crate::caller::shared_of;
    use crate::memory::WgpuBuffer;

    #[test]
    fn groups_are_made_once_and_go_with_their_buffers() {
        let Some(opened) = open_for_test() else { return };
        let shared = shared_of(&*opened).expect("our own");
        let [one, other] = [0; 2].map(|_| opened.allocate(64, "test").expect("small"));
        let bind = |buffer: &qgemm_hal::Buffer| {
            let raw = WgpuBuffer::of(shared, buffer.into(), "test").expect("our own");
            let mut bindings = [0; STORAGE_BUFFERS as usize].map(|_| shared.absent.as_entire_buffer_binding());
            bindings[0] = raw.buffer.as_entire_buffer_binding();
            bind_group(shared, "test", bindings).expect("valid")
        };
        let kept = || shared.groups.made.lock().expect("not poisoned").len();
        let first = bind(&one);
        assert!(first == bind(&one) && first != bind(&other) && kept() == 2);
        drop(one);
        assert_eq!(kept(), 1);
        drop(other);
        assert_eq!(kept(), 0);
    }
}
