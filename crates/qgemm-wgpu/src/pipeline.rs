//! Pipeline cache: shaders of a device, each compiled once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use qgemm_hal::HalError;

use crate::families::INTERFACES;
use crate::shader::Shader;
use crate::shared::Shared;

/// Kernel interface of an operation.
#[derive(Debug)]
pub(crate) struct Interface {
    /// Name of the operation.
    pub name: &'static str,
    /// A letter for each binding number from 0 on: `r` for one that kernels
    /// read, `w` for one that they write, `-` for an unused number.
    pub bindings: &'static str,
    /// Bytes of the parameters, which are passed as immediates.
    pub params_bytes: u32,
}

impl Interface {
    /// Used bindings.
    pub const fn count(&self) -> u32 {
        let (letters, mut used, mut i) = (self.bindings.as_bytes(), 0, 0);
        while i < letters.len() {
            used += (letters[i] != b'-') as u32;
            i += 1;
        }
        used
    }

    /// Number of each binding, and whether kernels write it.
    pub fn bindings(&self) -> impl Iterator<Item = (u32, bool)> {
        let used = (0..).zip(self.bindings.bytes()).filter(|(_, access)| *access != b'-');
        used.map(|(number, access)| (number, access == b'w'))
    }
}

/// The device objects of an interface.
pub(crate) struct Layout {
    pub bindings: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

/// Binding mode of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binding {
    /// Reads and writes use different buffers.
    Apart,
    /// Some buffer is both read and written, in different ranges or
    /// by the same invocations. wgpu then requires every binding of that
    /// buffer to be writable, so all bindings are.
    OneBuffer,
}

/// A compiled kernel: its name, for errors and
/// debuggers, and its pipeline.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub name: String,
    interface: &'static Interface,
    shader: Shader,
    apart: wgpu::ComputePipeline,
    /// Compiled by the first launch that reads and writes
    /// one buffer, which is rare.
    one_buffer: OnceLock<wgpu::ComputePipeline>,
}

impl Compiled {
    /// Compiles `shader`, unless cached.
    pub fn new(shared: &Shared, interface: &'static Interface, name: String, shader: Shader) -> Result<Self, HalError> {
        let apart = pipeline(shared, interface, Binding::Apart, &name, shader.clone())?;
        Ok(Self { name, interface, shader, apart, one_buffer: OnceLock::new() })
    }

    /// The pipeline for a binding mode.
    pub fn pipeline(&self, shared: &Shared, binding: Binding) -> Result<&wgpu::ComputePipeline, HalError> {
        if binding == Binding::Apart {
            return Ok(&self.apart);
        }
        if let Some(made) = self.one_buffer.get() {
            return Ok(made);
        }
        let made = pipeline(shared, self.interface, binding, &self.name, self.shader.writable())?;
        Ok(self.one_buffer.get_or_init(|| made))
    }
}

/// Layouts of all operations, and cached pipelines by source.
pub(crate) struct Pipelines {
    layouts: Vec<(&'static str, Binding, Layout)>,
    compiled: Mutex<HashMap<String, Arc<Mutex<Option<wgpu::ComputePipeline>>>>>,
}

impl Pipelines {
    pub fn new(device: &wgpu::Device) -> Self {
        let layout = |interface: &&Interface| {
            [Binding::Apart, Binding::OneBuffer].map(|how| (interface.name, how, Layout::new(device, interface, how)))
        };
        let layouts = INTERFACES.iter().flat_map(layout).collect();
        Self { layouts, compiled: Mutex::new(HashMap::new()) }
    }

    /// The layout of one of [`INTERFACES`].
    pub fn layout(&self, interface: &Interface, binding: Binding) -> &Layout {
        let own = self.layouts.iter().find(|(name, how, _)| (*name, *how) == (interface.name, binding));
        &own.unwrap_or_else(|| unreachable!("{} is not among the interfaces", interface.name)).2
    }
}

impl Layout {
    fn new(device: &wgpu::Device, interface: &Interface, how: Binding) -> Self {
        let entry = |(binding, written): (u32, bool)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: !written && how == Binding::Apart },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = interface.bindings().map(entry).collect();
        let label = Some(interface.name);
        let bindings = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
        let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: interface.params_bytes,
        });
        Self { bindings, pipeline }
    }
}

/// The pipeline of `shader`, compiled unless cached. `name`
/// is for errors and debuggers.
pub(crate) fn pipeline(
    shared: &Shared,
    interface: &Interface,
    binding: Binding,
    name: &str,
    shader: Shader,
) -> Result<wgpu::ComputePipeline, HalError> {
    let Shader { source, prelude } = shader;
    let place = {
        let mut compiled = shared.pipelines.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(compiled.entry(source.clone()).or_default())
    };
    // Others that want the same pipeline wait
    // here; the rest do not.
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipeline) = &*place {
        return Ok(pipeline.clone());
    }
    let _span = tracing::info_span!("compile", kernel = name).entered();
    let made = shared.try_scoped("compiling a kernel", || {
        let description = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(source.as_str().into()),
        };
        // SAFETY: the shader text is ours, and every access to a
        // buffer is within what a dispatch binds. `Touched::bind` refuses views
        // that are shorter than the extents of all accesses, from which
        // the strides also come. Workgroup memory is indexed by constants of
        // the tile and by invocation indices. Every loop counts to a
        // bound below in steps of at least 1. By operation:
        //
        // - `gemm`: rows of W are clamped to the last tile, tokens
        //   to the last of X. Columns of the column order are
        //   compared with `stored_k`; its entries and other columns of X with
        //   K; positions in C, bias, scales, residual and D with the
        //   counts of rows, features and tokens. An X that is read
        //   without column checks has whole steps of columns: otherwise
        //   `matrix::x_prologue` converts it, to as many columns as
        //   `WorkspaceLayout::with_x` makes whole steps. A split-K part has at
        //   least one k-tile; its partial sums are a matrix of whole
        //   row tiles, and there are as many as parts (`gemm/parts.rs`).
        // - `experts`: rows and experts in an index are compared with their
        //   counts, experts also with the number of bound ones.
        // - `convert`: rows are compared with their count; columns of X, D
        //   and the order with theirs; entries of the order with X's
        //   columns. D is written by vectors only when its rows are
        //   whole vectors (`convert::writes_vectors`).
        // - `routing`: tokens, slots, chunks and experts are compared with their
        //   counts, and ids with the number of experts. Positions in the
        //   lists are counts of earlier slots.
        // - `matmul`: rows, columns and positions along K are
        //   compared with M, N and K.
        // - `quantize`: rows and columns are compared with their counts;
        //   planes have whole groups of columns.
        // - `attention`: sequences, rows, keys, pages and mask words are compared
        //   with their counts, and offsets and lengths are clamped to what
        //   exists. When codes begin within a word, the next word is
        //   accessed only if it holds bytes of them.
        // - `kv_append`: as `attention`; positions are compared
        //   with the rows of the tables.
        // - `indexer`: queries, keys and pages are compared with their counts,
        //   and ends are clamped to the keys.
        // - `norm`: rows and columns are compared with their counts.
        let module =
            unsafe { shared.device.create_shader_module_trusted(description, wgpu::ShaderRuntimeChecks::unchecked()) };
        shared.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&shared.pipelines.layout(interface, binding).pipeline),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Our kernels write all workgroup memory before they read it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    })?;
    let pipeline = made.map_err(|fault| HalError::Compile {
        kernel: name.to_owned(),
        target: format!("{} (WGSL)", shared.id),
        options: prelude.lines().collect::<Vec<_>>().join(" "),
        log: fault.into_message(),
    })?;
    Ok(place.insert(pipeline).clone())
}
